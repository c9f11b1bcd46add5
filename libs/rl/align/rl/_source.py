"""Where the steps of a reinforcement run come from: prompts are drawn, answered by the present model, judged, made into micro-batches."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Protocol

from align.data import Cursor
from align.rl._errors import RlError
from align.rl._rewards import Reward
from align.rl._rollouts import Rollout, as_batch, fed
from align.rollout import Sampler
from align.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are sampled, and which of them are trained on."""

    group: Annotated[int, "answers to a prompt; train.global_batch / group prompts make a step"] = 8
    max_new_tokens: Annotated[int, "longest answer"] = 64
    temperature: Annotated[float, "of the sampling; the trainer's log-probabilities are taken at the same"] = 1.0
    batch: Annotated[int, "answers sampled at once"] = 256
    kv_budget_gb: Annotated[
        float | None, "native: GiB of the sampler's paged cache; none: what is needed, at most 60 % of what is free"
    ] = None
    sampler: Annotated[
        Literal["native", "vllm"], "who samples: this process, or one of its own that speaks the rollout protocol (section vllm)"
    ] = "native"
    inner_steps: Annotated[int, "optimizer steps on the same answers"] = 1
    dead_retries: Annotated[int, "rounds of fresh prompts that a step may draw in place of groups whose rewards are all equal"] = 1
    mask_dead_groups: Annotated[
        bool, "leave groups that stay dead out of the loss and its denominator; false keeps them, where only the KL moves them"
    ] = True
    overlong: Annotated[
        Literal["keep", "mask", "penalty"],
        "answers cut off at max_new_tokens: judged like others, left out of the loss, or a reward that falls over the last tokens",
    ] = "keep"
    overlong_buffer: Annotated[int, "penalty: tokens before max_new_tokens over which the reward falls by up to 1 (DAPO, section 3.4)"] = 16


def check_rollout(config: RolloutConfig, *, global_batch: int, micro_batch: int, world: int = 1) -> None:
    """Raises RlError, naming the field, for values that no run can have."""
    for name, value, least in (
        ("group", config.group, 1), ("max_new_tokens", config.max_new_tokens, 1), ("batch", config.batch, 1),
        ("inner_steps", config.inner_steps, 1), ("dead_retries", config.dead_retries, 0), ("overlong_buffer", config.overlong_buffer, 1),
    ):  # fmt: skip
        if value < least:
            raise RlError(f"rollout.{name} is {value}; it must be at least {least}")
    if micro_batch < 1:
        raise RlError(f"train.micro_batch is {micro_batch}; it must be at least 1")
    if config.kv_budget_gb is not None and not 0 < config.kv_budget_gb < 2**30:
        raise RlError(f"rollout.kv_budget_gb is {config.kv_budget_gb}; it must be above 0 GiB and finite, or none for what is needed")
    if not 0 < config.temperature < math.inf:
        why = "it must be above 0, or every answer of a group is the same" if config.temperature <= 0 else "it must be a finite number"
        raise RlError(f"rollout.temperature is {config.temperature}; {why}")
    if config.overlong == "penalty" and config.overlong_buffer > config.max_new_tokens:
        raise RlError(f"rollout.overlong_buffer {config.overlong_buffer} is more than rollout.max_new_tokens {config.max_new_tokens}")
    if config.group > global_batch:
        raise RlError(f"rollout.group is {config.group}; it must be at most train.global_batch {global_batch}")
    if global_batch % config.group:
        below = global_batch - global_batch % config.group
        raise RlError(f"train.global_batch {global_batch} is not a multiple of rollout.group {config.group}; try {below}")
    if global_batch % (world * micro_batch):
        raise RlError(f"train.global_batch {global_batch} is not a multiple of ranks {world} × train.micro_batch {micro_batch}")


@dataclass(frozen=True, eq=False)
class RlStep:
    """One optimizer step, for the Trainer: this rank's micro-batches; counts of all ranks."""

    micro_batches: list[dict[str, Any]]
    trained_tokens: int  # units of the loss: tokens, or answers
    tokens: int  # of prompts and answers, those that are not trained included
    epoch: float


class Credit(Protocol):
    """What turns rewards into advantages. Both methods write into the rollouts' `per_token`."""

    def annotate(self, rollouts: list[Rollout]) -> None:
        """Adds what a model's forward says of this rank's answers."""

    def assign(self, rollouts: list[Rollout], rewards: list[float]) -> dict[str, float]:
        """Given all ranks' answers and their shaped rewards, adds "advantages" and whatever the loss reads; returns numbers to log."""


class RolloutSource:
    """Gives the Trainer its steps. A step is `global_batch` answers, `group` to each prompt.

    A group is dead when the raw rewards of its answers are all equal: nothing says which answer was better. Dead groups are drawn anew, up
    to `dead_retries` rounds; a step whose groups all stay dead has no trained tokens, and the Trainer then takes no step of any kind.

    The order of prompts is the Cursor's; the noise of a draw is a function of (seed, number of the draw). So what a run samples is a
    function of its state alone, and a resumed one continues with the same prompts, retries and answers.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        prompts_ids: Sequence[list[int]],
        *,
        config: RolloutConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        reward: Reward,
        credit: Credit,
        global_batch: int,
        micro_batch: int,
        seed: int,
        per_answer: bool = False,
        judge_dead: bool = True,
        rank: int = 0,
        world: int = 1,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
            rows: what the reward is given; prompts_ids: their prompts as token ids, in the same order.
            sampler: reads the weights that are trained, in place or by a copy that its owner renews.
            judge_dead: look for dead groups at all; not where the credit comes from elsewhere than the reward.
            per_answer: the loss's units are answers, not tokens (`align.objectives.count_units`).
            gather: every rank's value, in the order of ranks, on every rank. alive: called between long phases.

        Raises:
            RlError: see `check_rollout`; no prompts.
        """
        check_rollout(config, global_batch=global_batch, micro_batch=micro_batch, world=world)
        if not rows:
            raise RlError("no prompts are left to train on; look at the rows and at what was left out")
        self._rows, self._prompts, self._config = rows, prompts_ids, config
        self._sampler, self._tokenizer, self._reward, self._credit = sampler, tokenizer, reward, credit
        self._global_batch, self._micro_batch, self._seed, self._per_answer = global_batch, micro_batch, seed, per_answer
        self._judge_dead = judge_dead and config.group > 1
        self._rank, self._world, self._gather, self._alive = rank, world, gather, alive
        self._cursor = Cursor(len(rows), seed=seed, digest=_digest(rows, prompts_ids))
        self._draws = 0  # of prompts, retries included
        self._steps = 0
        self._kept: list[Rollout] = []  # this rank's answers of the present step, while inner steps are left
        self._units = self._tokens = self._inner_left = 0
        self.numbers: dict[str, float] = {}
        """About the answers of the last step, for the log."""
        self.samples: list[Rollout] = []
        """The last step's answers of all ranks."""

    @property
    def digest(self) -> str:
        return self._cursor.digest

    def next_step(self) -> RlStep:
        """Raises RewardError, RlError; errors of the sampler."""
        if self._inner_left == 0:
            self._collect()
            self._inner_left = self._config.inner_steps if self._units else 1
        self._inner_left -= 1
        self._steps += 1
        parts = [self._kept[at : at + self._micro_batch] for at in range(0, len(self._kept), self._micro_batch)]
        parts = [[part[at] for at in fed(part)] for part in parts]
        pad_id = self._tokenizer.pad_id or 0
        batches = [{**as_batch(part, pad_id=pad_id), "units": self._units} for part in parts] if self._units else []
        step = RlStep(batches, self._units, self._tokens, self._cursor.progress)
        if self._inner_left == 0:
            self._kept = []
        return step

    def state_dict(self) -> dict[str, Any]:
        """JSON. Between the inner steps on one set of answers these are in it too: the weights that gave them are gone."""
        return {
            "cursor": self._cursor.state_dict(),
            "draws": self._draws,
            "steps": self._steps,
            "seed": self._seed,
            "inner": {
                "left": self._inner_left, "units": self._units, "tokens": self._tokens, "kept": [asdict(each) for each in self._everyone()],
                "numbers": self.numbers,
            },
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, allow_change: tuple[str, ...] = ()) -> None:
        """Raises DataError: other prompts or another seed; RlError: the state is not this source's."""
        try:
            inner = state["inner"]
            kept = [Rollout(**each) for each in inner["kept"]]
            draws, steps = int(state["draws"]), int(state["steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise RlError(f"the saved state is no rollout source's ({error!r}); resume a checkpoint of the same stage") from None
        self._cursor.load_state_dict(state["cursor"])
        share = len(kept) // self._world
        self._kept = kept[self._rank * share : (self._rank + 1) * share]
        self._draws, self._steps = draws, steps
        self._inner_left, self._units, self._tokens = inner["left"], inner["units"], inner["tokens"]
        self.numbers = dict(inner["numbers"])

    def _everyone(self) -> list[Rollout]:
        return [each for part in self._gather(self._kept if self._inner_left else []) for each in part]

    def _collect(self) -> None:
        """Samples and judges until there are enough groups with a signal, or the retries are used up."""
        config, wanted = self._config, self._global_batch // self._config.group
        self._sampler.weights_version = self._steps
        live: list[list[Rollout]] = []
        dead: list[list[Rollout]] = []
        first: list[list[Rollout]] = []
        rounds = 0
        while len(live) < wanted and rounds <= config.dead_retries:
            groups = self._sample(self._cursor.take(wanted - len(live)))
            first = first or groups
            for group in groups:
                is_dead = self._judge_dead and len({each.reward for each in group}) == 1
                (dead if is_dead else live).append(group)
            rounds += 1
        for group in dead:
            for each in group:
                each.trained = not config.mask_dead_groups
        kept = [each for group in [*live, *dead][:wanted] for each in group]
        for each in kept:
            each.trained &= len(each.ids) > 0 and not (config.overlong == "mask" and each.truncated)
        share = len(kept) // self._world
        mine = kept[self._rank * share : (self._rank + 1) * share]
        self._credit.annotate(mine)
        kept = [each for part in self._gather(mine) for each in part]
        numbers = self._credit.assign(kept, [each.reward - self._penalty(each) for each in kept])
        self._kept = kept[self._rank * share : (self._rank + 1) * share]
        self._units = _units(kept, self._per_answer) if live else 0
        self._tokens = sum(len(each.prompt_ids) + len(each.ids) for each in kept)
        self.samples = kept
        gone = {name: 0.0 for name in self.numbers if name.startswith("reason_")}  # a reason that no answer has any more is 0, no gap
        self.numbers = {
            **gone,
            **_statistics(first),
            "retry_rounds": rounds - 1,
            "trained_answers": sum(each.trained for each in kept),
            **numbers,
        }
        self._alive()

    def _sample(self, indices: list[int]) -> list[list[Rollout]]:
        """A group of answers to each prompt, judged; every rank works on its share and gets all."""
        config, number = self._config, len(indices)
        seeds = [_draw_seed(self._seed, self._draws + at) for at in range(number)]
        mine = range(self._rank, number, self._world)
        found = self._sampler.generate(
            [self._prompts[indices[at]] for at in mine],
            n=config.group,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seeds=[seeds[at] for at in mine],
        )
        self._alive()
        for sample in found:
            if sample.weights_version != self._steps:
                raise RlError(
                    f"the sampler answered from its weights of step {sample.weights_version}, the model is at step {self._steps}; "
                    "it did not take the new ones"
                )
        rows = [indices[at] for at in mine for _ in range(config.group)]
        distinct = {tuple(sample.ids): "" for sample in found}  # a group often says the same twice
        for ids in distinct:
            distinct[ids] = self._tokenizer.decode(ids, skip_special=True)
        texts = [distinct[tuple(sample.ids)] for sample in found]
        scored = self._reward.score([self._rows[row] for row in rows], texts)
        made: dict[int, list[Rollout]] = {}
        for place, (row, sample, text, score) in enumerate(zip(rows, found, texts, scored, strict=True)):
            at = mine[place // config.group]
            made.setdefault(at, []).append(
                Rollout(row, self._draws + at, sample.prompt_ids, sample.ids, sample.logprobs, sample.truncated, text, *score)
            )
        everyone = {at: group for part in self._gather(made) for at, group in part.items()}
        self._draws += number
        return [everyone[at] for at in range(number)]

    def _penalty(self, each: Rollout) -> float:
        """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), from 0 to 1; judging a group dead does not see it."""
        if self._config.overlong != "penalty":
            return 0.0
        buffer = self._config.overlong_buffer
        return min(max(0, len(each.ids) - (self._config.max_new_tokens - buffer)) / buffer, 1.0)


def _units(rollouts: Sequence[Rollout], per_answer: bool) -> int:
    return sum(each.trained if per_answer else len(each.ids) * each.trained for each in rollouts)


def _statistics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Of the first round alone: what is drawn in place of dead groups is no fair sample."""
    answers = [each for group in groups for each in group]
    count, tokens = len(answers), sum(len(each.ids) for each in answers)  # of answers that are all empty none
    dead = [group[0].reward for group in groups if len(group) > 1 and len({each.reward for each in group}) == 1]
    best = max(each.reward for each in answers)
    reasons = Counter(each.reason for each in answers)
    mean = sum(each.reward for each in answers) / count
    return {
        "reward": mean,
        "reward_std": (sum((each.reward - mean) ** 2 for each in answers) / count) ** 0.5,
        "dead_groups": len(dead) / len(groups),
        "dead_low": sum(reward < best or best <= 0 for reward in dead) / len(groups),
        "answer_tokens": tokens / count,
        "truncated": sum(each.truncated for each in answers) / count,
        "surprisal": -sum(sum(each.logprobs) for each in answers) / max(tokens, 1),
        **{f"reason_{name}": number / count for name, number in sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))[:8]},
    }


def _draw_seed(seed: int, draw: int) -> int:
    return int.from_bytes(hashlib.sha256(f"rollout:{seed}:{draw}".encode()).digest()[:8], "little") >> 1


def _digest(rows: Sequence[Mapping[str, Any]], prompts_ids: Sequence[list[int]]) -> str:
    digest = hashlib.sha256()
    for row, ids in zip(rows, prompts_ids, strict=True):
        digest.update(json.dumps([dict(row), ids], sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()
