"""Answers in steps, with a label each: reading them, making them, scoring them with a process reward model."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from align.data import Cursor, Example, encode_continued
from align.model import Decoder, pick_forward_impl
from align.objectives import bradley_terry_loss, label_logits, step_loss
from align.rl._errors import RlError
from align.rl._forward import row_hidden
from align.rl._source import RlStep
from align.tokenizer import Tokenizer

Neutral = Literal["good", "bad", "drop"]


@dataclass(frozen=True)
class StepExample:
    """A document and its steps: `ends` are positions of the last token of each, `labels` 1 (good) or 0."""

    ids: list[int]
    ends: list[int]
    labels: list[float]


@dataclass(frozen=True)
class EncodedSteps:
    """Documents in the order of their rows, and what became of the rows ("overlong", "unlabelled")."""

    examples: list[StepExample]
    dropped: Counter[str]
    digest: str

    @property
    def base_rate(self) -> float:
        labels = [label for each in self.examples for label in each.labels]
        return sum(labels) / len(labels)


def encode_steps(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Tokenizer,
    prompt_ids: Callable[[Mapping[str, Any]], list[int]],
    *,
    max_length: int,
    neutral: Neutral = "good",
    outcome: bool = False,
) -> EncodedSteps:
    """Rows {"prompt", "steps", "labels"} to documents: the prompt's ids, then the steps as they stand, each tokenised by itself, as text
    that follows.

    Labels are -1, 0, 1, or true and false; 0 is taken as `neutral` says, null is no label. A row may have "answer_label": then eos follows
    the last step and is labelled with it, which tells a complete answer from one that lacks its end. outcome: only the last label counts.
    Raises RlError: a label that is none of these, or no rows left.
    """
    examples: list[StepExample] = []
    dropped: Counter[str] = Counter()
    digest = hashlib.sha256()
    given = list(rows)
    for row in given:
        ids, marks = list(prompt_ids(row)), []
        for step, label in zip(row["steps"], row["labels"], strict=True):
            ids += encode_continued(tokenizer, step)
            marks.append((len(ids) - 1, label))
        if "answer_label" in row and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
            marks.append((len(ids) - 1, row["answer_label"]))
        known = [(end, good) for end, label in marks if (good := _good(label, neutral, row)) is not None]
        known = known[-1:] if outcome else known
        if len(ids) > max_length or not known:
            dropped["overlong" if len(ids) > max_length else "unlabelled"] += 1
            continue
        example = StepExample(ids, [end for end, _ in known], [good for _, good in known])
        examples.append(example)
        digest.update(repr((example.ids, example.ends, example.labels)).encode())
    if not examples:
        raise RlError(f"no rows are left of {len(given)} ({dict(dropped)}); look at data.max_length and at the labels")
    return EncodedSteps(examples, dropped, digest.hexdigest())


def _good(label: Any, neutral: Neutral, row: Mapping[str, Any]) -> float | None:
    if label is None:
        return None
    if label is True or label == 1:
        return 1.0
    if label is False or label == -1:
        return 0.0
    if label == 0:
        return {"good": 1.0, "bad": 0.0, "drop": None}[neutral]
    raise RlError(f"{getattr(row, 'place', 'a row')}: label {label!r} is none of -1, 0, 1, true, false")


class StepSource:
    """Gives the Trainer steps of `global_batch` documents, or pairs of them; units are labelled steps, or pairs."""

    def __init__(
        self, items: Sequence[StepExample] | Sequence[tuple[Example, Example]], *, digest: str, global_batch: int, micro_batch: int,
        seed: int, pad_id: int, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        """Raises RlError: global_batch is no multiple of ranks × micro_batch."""
        if global_batch % (world * micro_batch):
            raise RlError(f"train.global_batch {global_batch} is not a multiple of ranks {world} × train.micro_batch {micro_batch}")
        self._items, self._pad_id = items, pad_id
        self._global_batch, self._micro_batch, self._rank, self._world = global_batch, micro_batch, rank, world
        self._cursor = Cursor(len(items), seed=seed, digest=digest)

    @property
    def digest(self) -> str:
        return self._cursor.digest

    def next_step(self) -> RlStep:
        taken = [self._items[index] for index in self._cursor.take(self._global_batch)]
        share = self._global_batch // self._world
        mine = taken[self._rank * share : (self._rank + 1) * share]
        batches = [step_batch(mine[at : at + self._micro_batch], pad_id=self._pad_id) for at in range(0, share, self._micro_batch)]
        units = sum(len(each.labels) if isinstance(each, StepExample) else 1 for each in taken)
        tokens = sum(len(part.ids) for each in taken for part in ([each] if isinstance(each, StepExample) else each))
        return RlStep(batches, units, tokens, self._cursor.progress)

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor.state_dict(), "global_batch": self._global_batch}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_change: tuple[str, ...] = ()) -> None:
        """Raises DataError: other rows or another seed; RlError: another global batch."""
        if state.get("global_batch") != self._global_batch and "global_batch" not in allow_change:
            raise RlError(f"the saved run has train.global_batch {state.get('global_batch')!r}, this one {self._global_batch}; restore it")
        self._cursor.load_state_dict(state.get("cursor") or {})


def step_batch(items: Sequence[Any], *, pad_id: int) -> dict[str, Tensor]:
    """Right-padded documents: input_ids (B, T), lengths (B,); loss_mask (B, T) True at the ends of labelled steps, labels (B, T).

    Of pairs (chosen, rejected) first all chosen, then all rejected ones, with the mask at each one's last token.
    """
    if isinstance(items[0], StepExample):
        documents, marks = [each.ids for each in items], [list(zip(each.ends, each.labels, strict=True)) for each in items]
    else:
        documents = [side.ids.tolist() for number in (0, 1) for side in (pair[number] for pair in items)]
        marks = [[(len(ids) - 1, 0.0)] for ids in documents]
    width = max(map(len, documents))
    batch = {
        "input_ids": torch.full((len(documents), width), pad_id),
        "lengths": torch.tensor([len(ids) for ids in documents]),
        "loss_mask": torch.zeros(len(documents), width, dtype=torch.bool),
        "labels": torch.zeros(len(documents), width),
    }
    for row, (ids, own) in enumerate(zip(documents, marks, strict=True)):
        batch["input_ids"][row, : len(ids)] = torch.tensor(ids)
        for end, label in own:
            batch["loss_mask"][row, end], batch["labels"][row, end] = True, label
    return batch


class StepScorer(nn.Module):
    """What a process reward model says after a token: log-odds that the answer is good so far.

    With label tokens it is the LM head's good against bad token; else a linear head of its own, which starts at 0 and is in fp32.
    """

    def __init__(self, model: Decoder, label_token_ids: Sequence[int] | None) -> None:
        """Raises RlError: not two different ids of the vocabulary."""
        super().__init__()
        self.labels = tuple(label_token_ids) if label_token_ids is not None else None
        vocabulary = model.config.vocab_size
        if self.labels is not None and (len(set(self.labels)) != 2 or not all(0 <= label < vocabulary for label in self.labels)):
            raise RlError(f"label_token_ids {list(self.labels)} must be two different ids below the vocabulary's {vocabulary}: good, bad")
        self._model = (model,)  # in a tuple: its weights are not this module's
        if self.labels is None:
            self.weight = nn.Parameter(torch.zeros(model.config.hidden_size, device=model.output_weight.device))
            self.bias = nn.Parameter(torch.zeros((), device=model.output_weight.device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Log-odds (...) of hidden states (..., D)."""
        if self.labels is not None:
            return label_logits(hidden, self._model[0].output_weight, *self.labels)
        return hidden.float() @ self.weight + self.bias


class StepObjective:
    """A process reward model and its loss, in the form that align.train.Trainer asks for: steps or outcomes by cross-entropy, pairs by
    Bradley and Terry.
    """

    def __init__(self, model: Decoder, scorer: StepScorer, *, about: Mapping[str, Any], pairwise: bool = False) -> None:
        """about: JSON that is saved with the weights and says how they are to be asked; a resume compares it."""
        self.model: nn.Module = model
        self.forward_impl: str | None = pick_forward_impl()
        self.scorer, self._about, self._pairwise = scorer, dict(about), pairwise

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | float, dict[str, Tensor | float]]:
        """The summed loss and its units. Logged: accuracy."""
        hidden, mask = row_hidden(self.model, batch, forward_impl=pick_forward_impl()), batch["loss_mask"]
        logits = self.scorer(hidden[mask])  # (N,)
        if self._pairwise:
            chosen, rejected = logits.chunk(2)
            return bradley_terry_loss(chosen, rejected).sum(), float(len(chosen)), {"step_accuracy": (chosen > rejected).float().sum()}
        labels = batch["labels"][mask]
        right = ((logits > 0) == (labels > 0.5)).float().sum()
        return step_loss(logits, labels, torch.ones_like(labels, dtype=torch.bool)), float(len(labels)), {"step_accuracy": right}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()
        yield from ((f"score_head.{name}", parameter) for name, parameter in self.scorer.named_parameters())

    def extra_state(self) -> dict[str, Any]:
        return {"prm": self._about, **{f"score_head.{name}": value.detach() for name, value in self.scorer.state_dict().items()}}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Raises RlError: the saved model is asked otherwise."""
        if state.get("prm") != self._about:
            raise RlError(f"the checkpoint is a reward model of {state.get('prm')}, this run's of {self._about}; restore the configuration")
        load_score_head(self.scorer, state)


def load_score_head(scorer: StepScorer, state: Mapping[str, Any]) -> None:
    """Takes the head from a checkpoint's extra state, tensors by "score_head.…"."""
    found = {name.removeprefix("score_head."): value for name, value in state.items() if name.startswith("score_head.")}
    if found.keys() != scorer.state_dict().keys():
        raise RlError(
            f"the reward model's head is {sorted(found)}, expected {sorted(scorer.state_dict())}; set prm.head to how it was trained"
        )
    scorer.load_state_dict(found)


@torch.no_grad()
def score_steps(model: Decoder, scorer: StepScorer, items: Sequence[Any], *, micro_batch: int, pad_id: int) -> list[float]:
    """The log-odds of every labelled step, in order; of pairs, all chosen and then all rejected of each micro-batch."""
    device, out = model.output_weight.device, []
    for start in range(0, len(items), micro_batch):
        batch = {name: value.to(device) for name, value in step_batch(items[start : start + micro_batch], pad_id=pad_id).items()}
        hidden = row_hidden(model, batch, forward_impl=pick_forward_impl())
        out += scorer(hidden[batch["loss_mask"]]).tolist()
    return out


def auc(scores: Sequence[float], labels: Sequence[float]) -> float:
    """The probability that a good step scores above a bad one, ties counting half; NaN where one kind is absent, or a score is NaN
    (Mann and Whitney 1947)."""
    if any(math.isnan(score) for score in scores):  # of a model that has diverged; nothing is equal to it, not even itself
        return float("nan")
    ranked = sorted(range(len(scores)), key=scores.__getitem__)
    rank_sum, positives, at = 0.0, sum(label > 0.5 for label in labels), 0
    while at < len(ranked):
        to = at
        while to < len(ranked) and scores[ranked[to]] == scores[ranked[at]]:
            to += 1
        rank_sum += sum(labels[index] > 0.5 for index in ranked[at:to]) * (at + to + 1) / 2
        at = to
    negatives = len(labels) - positives
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives) if positives and negatives else float("nan")


def step_end_ids(tokenizer: Tokenizer, marker: str) -> list[bool]:
    """Whether each id ends a step: its text ends with the marker, spaces aside ("." or a newline). Raises RlError: none does."""
    kept = marker.strip(" ")
    found = [
        kept in (text := tokenizer.decode([token])).strip(" ") and text.strip(" ").endswith(kept) for token in range(tokenizer.vocab_size)
    ]
    if not kept or not any(found):
        raise RlError(f"no token of the vocabulary ends with {marker!r}; set prm.step_end to what ends a step, such as '.' or a newline")
    return found
