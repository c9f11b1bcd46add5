"""RunShape: a training run as plain numbers."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

FORWARD_IMPLS = ("sdpa_causal", "cpu_per_document", "varlen", "invariant")
_MIN_BLOCK = 64  # align.optim8bit: a row that 64 does not divide keeps fp32 state


class GuardError(ValueError):
    """Numbers that describe no run; the message names the field, the value and what it may be."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What memory depends on. Architecture fields left at 0 leave activations and logits out of the projection.

    Sizes are counts of elements, tokens or ranks unless the name says otherwise; *_gb is GiB, *_bytes is bytes an element.
    """

    parameters: int  # elements of the model's weights over all ranks; all are trained, or an adapter's alone
    adapter: int = 0  # trained elements of an adapter, fp32, on every rank; 0: there is none
    # Architecture.
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocabulary: int = 0
    tied: bool = False
    # Optimizer.
    optimizer: Literal["adamw8bit", "adamw", "offload_adamw"] = "adamw8bit"
    block: int = 2048  # elements that share a scale
    scales: int | None = None  # scales of one moment, counted over the parameters' shapes; None: (parameters - fp32_state) / block
    fp32_state: int = 0  # elements whose moments are fp32: vectors, small and oddly shaped parameters
    largest: int = 0  # elements of the largest parameter
    largest_group: int = 0  # elements of the largest set of parameters with one block size, which are stepped together; 0: all
    pinned_staging_gb: float = 0.0  # per rank, offload_adamw
    # Run.
    device: Literal["cuda", "cpu"] = "cuda"
    ranks: int = 1
    micro_batch: int = 1
    length: int = 0  # tokens of a row
    accumulation: int = 1
    weight_bytes: int = 2  # of weights, gradients and activations alike
    checkpointing: Literal["none", "selective", "full"] = "none"  # selective: every second block, not the last
    compiled: bool = False  # blocks by align.kernels or through torch.compile on a GPU: the gate is kept but not its SiLU
    in_backward: bool = False  # each block is stepped in the backward, and its gradients freed
    forward_impl: str = "sdpa_causal"
    padding: float = 1.0  # cpu_per_document: padded positions for each token when every document has a row of its own
    trained_share: float = 1.0  # of the tokens, those that the loss counts
    logits_chunk: int | None = None  # rows of logits at a time; None: 2**26 / vocabulary, at least 256
    layer_bytes_per_token: float | None = None  # what one block keeps for its backward, measured on one block; None: by formula
    # Sampling between steps, align.rollout on a GPU.
    sampler_rows: int = 0  # samples at once; 0: nothing is sampled, or by another process
    sampler_length: int = 0  # positions of the longest
    sampler_budget_gb: float | None = None  # its cache takes at most this; None: what the rows need
    sampler_copy: bool = False  # from a copy of the weights, freed with the cache (shards, adapters); else in place, the cache is kept
    # Saving.
    per_rank_optimizer_state: bool = True
    save_mode: Literal["snapshot", "stream"] = "snapshot"
    snapshot_weights: bool = False  # snapshot: the weights are copied to the host beside the optimizer's state, as align.checkpoint does
    gather_copies: int = 3  # of all state on the host when rank 0 gathers it: the parts, the whole, the file's; align.checkpoint makes 1
    checkpoints_kept: int = 1
    # Host.
    host_base_gb_per_rank: float | None = None  # interpreter, torch, CUDA context; None: measured ones, see README
    lean_workers: int = 0

    def __post_init__(self) -> None:
        for name in ("parameters", "ranks", "micro_batch", "accumulation", "block", "gather_copies"):
            if getattr(self, name) < 1:
                raise GuardError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "layers",
            "hidden",
            "intermediate",
            "heads",
            "kv_heads",
            "head_dim",
            "vocabulary",
            "fp32_state",
            "adapter",
            "largest",
            "largest_group",
            "length",
            "pinned_staging_gb",
            "sampler_rows",
            "sampler_length",
            "checkpoints_kept",
            "lean_workers",
        ):
            if getattr(self, name) < 0:
                raise GuardError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name, choices in (
            ("optimizer", ("adamw8bit", "adamw", "offload_adamw")),
            ("device", ("cuda", "cpu")),
            ("checkpointing", ("none", "selective", "full")),
            ("save_mode", ("snapshot", "stream")),
            ("weight_bytes", (2, 4)),
            ("forward_impl", FORWARD_IMPLS),
        ):
            if getattr(self, name) not in choices:
                raise GuardError(f"{name} is {getattr(self, name)!r}; known: {', '.join(map(str, choices))}")
        if self.padding < 1:
            raise GuardError(f"padding is {self.padding}; it is padded positions for each token, at least 1")
        if self.in_backward and self.accumulation > 1:
            raise GuardError(f"accumulation is {self.accumulation}; a step that is taken in the backward has 1")
        if self.sampler_budget_gb is not None and not self.sampler_budget_gb > 0:
            raise GuardError(f"sampler_budget_gb is {self.sampler_budget_gb}; it must be above 0, or None")
        if not 0 <= self.trained_share <= 1:
            raise GuardError(f"trained_share is {self.trained_share}; it is a share, 0 to 1")
        if self.fp32_state > self.parameters:
            raise GuardError(f"fp32_state {self.fp32_state} is more than parameters {self.parameters}")

    @classmethod
    def of(
        cls, parameter_shapes: Iterable[tuple[int, ...]], *, block_size: int = 2048, min_8bit_elems: int = 4096, **fields: Any
    ) -> "RunShape":
        """Counts parameters, scales and fp32 states exactly, over the full shapes of the trained parameters.

        A parameter's block is the largest power of two up to `block_size` that divides the length of its rows, as in align.optim8bit.
        """
        total = scales = fp32 = largest = 0
        groups: Counter[int] = Counter()
        for shape in parameter_shapes:
            size = math.prod(shape)
            row = size // shape[0] if shape and shape[0] else 0
            block = min(block_size, row & -row)
            total, largest = total + size, max(largest, size)
            if len(shape) < 2 or size < min_8bit_elems or block < _MIN_BLOCK:
                fp32 += size
                groups[0] += size
            else:
                scales += size // block
                groups[block] += size
        return cls(
            parameters=total,
            scales=scales,
            fp32_state=fp32,
            largest=largest,
            largest_group=max(groups.values(), default=0),
            block=block_size,
            **fields,
        )

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.length

    @property
    def base_gb(self) -> float:
        """Host memory of one rank before anything of the run is in it, GiB."""
        if self.host_base_gb_per_rank is not None:
            return self.host_base_gb_per_rank
        if self.device == "cpu":
            return 0.25
        return 1.08 if self.ranks == 1 else 1.54  # NCCL's part
