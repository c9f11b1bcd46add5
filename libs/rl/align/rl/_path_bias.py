"""How far forward implementations disagree about log-probabilities, measured on one checkpoint and valid for no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from align.model import Decoder
from align.rl._errors import RlError
from align.rl._forward import Scorer
from align.rl._rollouts import Rollout

SAMPLER = "sampler"


def path_bias(
    model: Decoder, rollouts: Sequence[Rollout], implementations: Sequence[str], *, micro_batch: int, pad_id: int, temperature: float = 1.0
) -> dict[str, dict[str, float]]:
    """For every two ways to the log-probabilities of sampled tokens ("sampler": what the sampler recorded) the mean of their difference
    (bias), its mean size, its largest size, over tokens; and the largest size of an answer's summed difference.

    Names are "a - b"; in nats. Raises RlError: no answer has a token.
    """
    if not any(each.ids for each in rollouts):
        raise RlError(f"path_bias: of {len(rollouts)} answers none has a token, so there is nothing to compare; look at the prompts")
    found: dict[str, list[list[float]]] = {SAMPLER: [each.logprobs for each in rollouts]}
    for name in implementations:
        scorer = Scorer(micro_batch=micro_batch, pad_id=pad_id, temperature=temperature, forward_impl=name)
        found[name] = scorer.logprobs(model, rollouts)
    names = list(found)
    return {f"{a} - {b}": _difference(found[a], found[b]) for at, a in enumerate(names) for b in names[at + 1 :]}


def _difference(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> dict[str, float]:
    rows = [torch.tensor(x, dtype=torch.float64) - torch.tensor(y, dtype=torch.float64) for x, y in zip(a, b, strict=True)]
    flat = torch.cat(rows)
    return {
        "bias": float(flat.mean()),
        "mean_size": float(flat.abs().mean()),
        "largest": float(flat.abs().max()),
        "largest_of_answers": max(float(row.sum().abs()) for row in rows),
    }


def read_path_bias(path: Path, *, weights: str, forward_impl: str, dtype: str, limit: float) -> Mapping[str, Any]:
    """A report of //stages:path_bias, if it is of these weights in this dtype and says that sampler and trainer agree.

    Raises:
        RlError: no such report, of other weights or another dtype, without this forward, or with a larger mean difference than `limit`.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sizes = {name: float(pair["mean_size"]) for name, pair in report["differences"].items()}
        own = {name: str(report[name]) for name in ("weights", "dtype")}
    except OSError as error:
        raise RlError(f"path_bias {path}: can't be read ({error.strerror}); make it with //stages:path_bias") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RlError(f"path_bias {path} is no report of //stages:path_bias; make it anew") from None
    for name, wanted in (("weights", weights), ("dtype", dtype)):
        if own[name] != wanted:
            raise RlError(f"path_bias {path} is of other {name} ({own[name]:.12}… there, {wanted:.12}… here); make it anew")
    size = sizes.get(f"{SAMPLER} - {forward_impl}")
    if size is None:
        raise RlError(f"path_bias {path} does not compare the sampler with {forward_impl}; add it to path_bias's implementations")
    if not size <= limit:
        raise RlError(f"path_bias {path}: sampler and {forward_impl} differ by {size:.2g} nats a token, more than {limit:g}")
    return report
