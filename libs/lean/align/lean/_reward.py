"""Verdicts for reinforcement learning: a batch through the pool, its reasons counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from align.lean._check import Verdict, check_in
from align.lean._errors import HeaderError, StatementError
from align.lean._policy import Policy
from align.lean._pool import LeanPool
from align.lean._text import extract_code, preamble_of, split_imports, statement_of, without_header


@dataclass(frozen=True)
class Problem:
    """A trusted statement: a proposition, the name its proof must have, and the header it is read under."""

    statement: str
    name: str
    header: str = ""

    @classmethod
    def of_theorem(cls, theorem: str, header: str = "") -> "Problem":
        """From a data set's text, `theorem NAME (binders) : proposition := …`; what it declares before the theorem joins the header."""
        name, statement = statement_of(theorem)
        imports, preamble = split_imports(preamble_of(theorem))
        return cls(statement, name, imports + header + (preamble and f"{preamble}\n"))


class LeanReward:
    """Calls the pool for a batch of (problem, completion) pairs; `counts` holds how often each status and reason came.

    A score is 1.0 for accept and 0.0 for reject; `timeout` and `resource` score as given (0.0), a crash scores None: it is a fault of the
    machinery, or a submission that kills its checker, and says nothing about the proof; leave such a sample out of the group.
    """

    def __init__(
        self,
        pool: LeanPool,
        *,
        policy: Policy | None = None,
        timeout_score: float | None = 0.0,
        resource_score: float | None = 0.0,
        extract: Callable[[str], str] = extract_code,
    ):
        self.pool, self.policy, self.extract = pool, policy or Policy(), extract
        self.values = {"accept": 1.0, "reject": 0.0, "timeout": timeout_score, "resource": resource_score, "crash": None}
        self.counts: Counter[str] = Counter()

    def __call__(self, batch: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        """One verdict a pair, in order. A statement or header that Lean refuses is reported as crash (bad_statement, bad_header)."""
        # Neighbours with one header share children.
        order = sorted(range(len(batch)), key=lambda k: batch[k][0].header)
        verdicts: dict[int, Verdict] = {}
        with ThreadPoolExecutor(self.pool.workers) as threads:
            for k, verdict in zip(order, threads.map(self._one, [batch[k] for k in order]), strict=True):
                verdicts[k] = verdict
                self.counts[f"{verdict.status}: {verdict.reason}"] += 1
        return [verdicts[k] for k in range(len(batch))]

    def score(self, verdict: Verdict) -> float | None:
        """The reward of a verdict; None: no reward can be given."""
        return self.values[verdict.status]

    def _one(self, pair: tuple[Problem, str]) -> Verdict:
        problem, completion = pair
        submission = without_header(self.extract(completion), problem.header)
        try:
            return check_in(self.pool, problem.statement, submission, name=problem.name, header=problem.header, policy=self.policy)
        except StatementError as mistake:
            return Verdict("crash", "bad_statement", str(mistake))
        except HeaderError as mistake:
            return Verdict("crash", "bad_header", str(mistake))
