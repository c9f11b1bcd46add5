"""How fast a step was, how much memory it took, and whether its loss jumped."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from align.model import Decoder

# Dense bf16, TFLOP/s, from NVIDIA's data sheets (without sparsity); the longest name that fits counts.
PEAKS = {"H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "H20": 148.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.2, "B200": 2250.0}
SPIKE_WINDOW = 64  # losses that a new one is compared with
SPIKE_LEAST = 16  # none is called a spike before so many


def step_flops(model: nn.Module, micro_batches: Sequence[Any]) -> float:
    """Model FLOPs of a step's forward and backward on one rank: 6 for a token and each weight of a matrix product, 6 · L · H · Dh for a
    token and each position of its document (causal attention is half of 12; Narayanan et al. 2021, arXiv:2104.04473, appendix).
    What is computed again does not count, nor does the padding of a batch that has `lengths` (B,).

    0 for a model that is no Decoder, or batches without input_ids.
    """
    if not isinstance(model, Decoder):
        return 0.0
    config = model.config
    matrices = sum(parameter.numel() for block in model.blocks for parameter in block.parameters() if parameter.ndim == 2)
    per_token = 6.0 * (matrices + config.vocab_size * config.hidden_size)
    per_pair = 6.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    total = 0.0
    for batch in micro_batches:
        fields: Mapping[str, Any] = batch if isinstance(batch, Mapping) else vars(batch)
        ids, ends = fields.get("input_ids"), fields.get("cu_seqlens")
        if ids is None:
            return 0.0
        if (lengths := fields.get("lengths")) is not None:
            documents = lengths.tolist()
        elif ends is not None:
            documents = [end - start for start, end in pairwise(ends.tolist())]
        else:
            documents = [ids.shape[1]] * ids.shape[0]
        total += sum(documents) * per_token + sum(length**2 for length in documents) * per_pair
    return total


def peak_flops(device: torch.device, given: float | None) -> float | None:
    """FLOP/s that MFU is a share of: the configured TFLOP/s, else those of a known GPU, else None."""
    if given is not None:
        return given * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = sorted((part for part in PEAKS if part in name), key=len)
    return PEAKS[known[-1]] * 1e12 if known else None


def memory_gb(device: torch.device) -> float:
    """GiB: the most that torch has had on the GPU so far; on the CPU the most that the process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes


def is_spike(losses: Sequence[float], loss: float) -> bool:
    """Whether a loss is out of line with those before it: not finite, or above their mean by a tenth of it and by six deviations."""
    if not math.isfinite(loss):
        return True
    if len(losses) < SPIKE_LEAST:
        return False
    mean = sum(losses) / len(losses)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in losses) / len(losses))
    return loss > mean + max(6 * deviation, 0.1 * abs(mean))
