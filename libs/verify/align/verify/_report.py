"""Verdicts for a person: explanations of one, tables of many; and many at once."""

from collections.abc import Iterable, Sequence

from align.verify._budget import VerifyError
from align.verify._judge import Verdict, equivalent, grade

REASONS = {
    "equal": "the answer equals the gold",
    "different": "the answer differs from the gold",
    "bare": "decided on an answer that stands without a marker",
    "no_answer": "no marked answer was found",
    "unreadable_answer": "the marked answer cannot be read as mathematics or words",
    "unreadable_gold": "the gold cannot be read: leave this row out, or repair it",
    "undecided": "neither a proof nor a refutation was found; counts as wrong",
    "undecided_budget": "the answer is too large to be looked at; counts as wrong",
    "error": "the judge failed on this input, which is a bug of it; counts as wrong",
}


def explain(verdict: Verdict) -> str:
    """A verdict in a few lines: what was read on both sides, as what, and why the judge says what it says."""
    word = {True: "correct", False: "not correct", None: "no verdict"}[verdict.correct]
    lines = [f"{word}: {REASONS[verdict.reason]}"]
    for name, value in (("gold", verdict.gold_value), ("answer", verdict.value)):
        if value is None:
            continue
        if value.kind == "raw":
            lines.append(f"  {name}: {value.source!r:.120} was not read ({value.info})")
        else:
            unit = f" in {value.unit}" if value.unit else ""
            lines.append(f"  {name}: {value.source!r:.120} was read as {value.kind}{unit}")
    if verdict.steps:
        lines.append(f"  steps: {verdict.steps}")
    return "\n".join(lines)


def grade_batch(
    golds: Sequence[str], texts: Sequence[str], *, mode: str = "final", bare: bool = False, processes: int | None = None
) -> list[Verdict]:
    """`grade` (or, with `bare`, `equivalent`) of each pair, in order.

    processes: 1 works in this process; None takes one per core from 4,000 pairs on. Workers are spawned, so a script that calls this at its
        top level needs the usual `if __name__ == "__main__":`.

    Raises: VerifyError when the lists differ in length, for less than one process, when a worker cannot start or dies (out of memory, a
        script without that line, a signal).
    """
    if len(golds) != len(texts):
        raise VerifyError(f"{len(golds)} golds but {len(texts)} texts; give one gold for each text")
    if processes is not None and (not isinstance(processes, int) or processes < 1):
        raise VerifyError(f"processes {processes!r} is not a number from 1; give a number of workers, or leave it out")
    pairs = list(zip(golds, texts, strict=True))
    if processes is None:
        import os

        processes = 1 if len(pairs) < 4_000 else os.cpu_count() or 1
    if processes == 1 or len(pairs) < 2:
        return _judged((pairs, mode, bare))
    from align.verify._workers import judge_over

    size = max(1, min(500, -(-len(pairs) // (4 * processes))))
    jobs = [(pairs[k : k + size], mode, bare) for k in range(0, len(pairs), size)]
    return [verdict for chunk in judge_over(_judged, jobs, processes) for verdict in chunk]


def _judged(job: tuple[list[tuple[str, str]], str, bool]) -> list[Verdict]:
    pairs, mode, bare = job
    return [equivalent(gold, text) if bare else grade(gold, text, mode=mode) for gold, text in pairs]


def summary(verdicts: Iterable[Verdict]) -> str:
    """Counts by reason, the accuracy over the rows that have a verdict, and the shares that could not be read or decided."""
    counts: dict[str, list[int]] = {}
    for verdict in verdicts:
        entry = counts.setdefault(verdict.reason, [0, 0])
        entry[0] += 1
        entry[1] += verdict.correct is True
    total = sum(entry[0] for entry in counts.values())
    judged = total - counts.get("unreadable_gold", [0, 0])[0]
    right = sum(entry[1] for entry in counts.values())
    lines = [f"{'reason':<20}{'rows':>8}{'correct':>9}"]
    lines += [f"{reason:<20}{counts[reason][0]:>8}{counts[reason][1]:>9}" for reason in REASONS if reason in counts]
    lines.append(f"{'all':<20}{total:>8}{right:>9}")
    lines.append(f"accuracy {_share(right, judged)} of {judged} rows with a readable gold")
    for name, reasons in (
        ("unreadable answers", ["unreadable_answer"]), ("no answer", ["no_answer"]), ("undecided", ["undecided", "undecided_budget"]),
    ):  # fmt: skip
        lines.append(f"{name} {_share(sum(counts.get(reason, [0])[0] for reason in reasons), judged)}")
    lines.append(f"unreadable golds {_share(total - judged, total)} of all rows")
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "n/a"
