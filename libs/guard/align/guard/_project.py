"""project: memory part by part, in bytes by formula, in GiB where it is told.

Weights, gradients, optimizer state and save transient are arithmetic. What a block keeps for its backward is counted over the
operations of align.model (`_layer_bytes`); the peaks are those of the phases of a step, whose parts are not alive at the same time.
"""

from dataclasses import dataclass

from align.guard._shape import RunShape

GIB = 2**30
LEAN_WORKER_GB, LEAN_SHARED_GB = 0.25, 3.4  # one REPL; the .olean files that all of them map
_CHUNK_ELEMENTS = 2**26  # align.objectives: fp32 logits of a chunk
_OPTIMIZER_RUN = 2**22  # align.optim8bit, torch backend: elements stepped at a time …
_OPTIMIZER_BYTES = 49  # … and bytes for each of them
SAMPLER_PAGE = 128  # positions of a page of align.rollout
_HEAP = 1.5  # resident for each byte that comes and goes on the CPU: the C heap keeps holes (measured, see README)


@dataclass(frozen=True)
class Projection:
    """Memory of a run in GiB. "Device" is one rank's accelerator; on the CPU the device parts are host memory, and are in total_gb."""

    shape: RunShape
    weights_gb: float  # one rank's part
    grads_gb: float
    device_optimizer_state_gb_per_rank: float
    activations_gb: float  # kept for the backward of one micro-batch
    logits_gb: float  # the loss: one chunk of logits with its gradients
    gathered_gb: float  # several ranks: what FSDP has whole at a time
    sampler_cache_gb: float  # keys and values of the samples
    sampler_copy_gb: float  # the whole weights that they are drawn from, where those are not the trained ones
    phases: dict[str, float]  # device memory at each phase of a step, all parts together
    device_peak_gb: float
    host_base_gb: float
    host_optimizer_gb: float  # offload_adamw: fp32 master and two moments
    host_staging_gb: float
    host_lean_gb: float
    host_run_gb: float  # on the CPU: the device parts of all ranks as the system sees them, with the heap's holes
    total_gb: float  # host, all ranks of one machine, while training
    checkpoint_save_transient_gb: float  # host, more while saving
    peak_gb: float  # host
    checkpoint_gb: float  # on disk, each

    def table(self) -> str:
        """The parts as lines for a person."""
        shape = self.shape
        rows = [
            ("weights", self.weights_gb),
            ("gradients", self.grads_gb),
            (f"optimizer state ({shape.optimizer})", self.device_optimizer_state_gb_per_rank),
            (f"activations (checkpointing {shape.checkpointing}, {shape.forward_impl})", self.activations_gb),
            ("logits and loss", self.logits_gb),
            ("gathered by FSDP", self.gathered_gb),
            (f"sampler's cache, {shape.sampler_rows} rows", self.sampler_cache_gb),
            ("sampler's copy of the weights", self.sampler_copy_gb),
            (f"device peak, each of {shape.ranks}" if shape.device == "cuda" else "peak of the run, each rank", self.device_peak_gb),
            ("host: interpreter and libraries", self.host_base_gb),
            ("host: optimizer", self.host_optimizer_gb),
            ("host: pinned staging", self.host_staging_gb),
            ("host: Lean", self.host_lean_gb),
            ("host: the run, with the heap's holes", self.host_run_gb),
            ("host: total", self.total_gb),
            ("host: more while saving", self.checkpoint_save_transient_gb),
            ("host: peak", self.peak_gb),
            (f"disk: {shape.checkpoints_kept} + 1 checkpoints", self.checkpoint_gb * (shape.checkpoints_kept + 1)),
        ]
        return "\n".join(f"{name:<52}{amount(value):>14}" for name, value in rows if value)


def amount(gib: float) -> str:
    """In MiB where GiB would say 0.00."""
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2f} MiB"


def project(shape: RunShape) -> Projection:
    """The memory of a run. Figures are GiB (the seed's "GB"), computed from the numbers of `shape` and nothing else."""
    share = shape.parameters / shape.ranks
    weights = grads = share * shape.weight_bytes
    state = _state_bytes(shape) / shape.ranks
    if shape.adapter:  # on every rank
        weights, grads, state = weights + 4 * shape.adapter, 4.0 * shape.adapter, _state_bytes(shape)
    on_host = shape.optimizer == "offload_adamw"
    device_state = 0.0 if on_host else state
    saved, gathered = _saved_bytes(shape), _gathered_bytes(shape)
    cache, copy = _sampler_bytes(shape)
    kept = 0.0 if shape.sampler_copy else cache
    phases = {name: value + gathered + kept for name, value in _phases(shape, weights, grads, device_state).items()}
    if cache:
        phases["sampling"] = weights + device_state + cache + copy
    device_peak = max(phases.values())

    base = shape.base_gb * shape.ranks * GIB
    host_optimizer = state * shape.ranks if on_host else 0.0
    staging = shape.pinned_staging_gb * shape.ranks * GIB if on_host else 0.0
    lean = (shape.lean_workers * LEAN_WORKER_GB + LEAN_SHARED_GB) * GIB if shape.lean_workers else 0.0
    transient = _save_transient(shape, device_state * shape.ranks)
    host = base + host_optimizer + staging + lean
    if shape.device == "cpu":
        standing = weights + device_state
        run = (standing + _HEAP * (device_peak - standing)) * shape.ranks
        total, peak = host + run, host + max(run, standing * shape.ranks + transient)
    else:
        run, total, peak = 0.0, host, host + transient
    return Projection(
        shape=shape,
        weights_gb=weights / GIB,
        grads_gb=grads / GIB,
        device_optimizer_state_gb_per_rank=device_state / GIB,
        activations_gb=saved / GIB,
        logits_gb=_loss_bytes(shape) / GIB,
        gathered_gb=gathered / GIB,
        sampler_cache_gb=cache / GIB,
        sampler_copy_gb=copy / GIB,
        phases={name: value / GIB for name, value in phases.items()},
        device_peak_gb=device_peak / GIB,
        host_base_gb=base / GIB,
        host_optimizer_gb=host_optimizer / GIB,
        host_staging_gb=staging / GIB,
        host_lean_gb=lean / GIB,
        host_run_gb=run / GIB,
        total_gb=total / GIB,
        checkpoint_save_transient_gb=transient / GIB,
        peak_gb=peak / GIB,
        checkpoint_gb=(weights * shape.ranks + state * shape.ranks) / GIB,
    )


def _state_bytes(shape: RunShape) -> float:
    """Optimizer state of all ranks.

    adamw8bit: two codes an element and two fp32 scales a block. Else fp32 moments, and a master of bf16 weights.
    """
    if shape.adapter:
        each = {"adamw8bit": 2 + 8 / shape.block, "adamw": 8.0, "offload_adamw": 12.0}
        return each[shape.optimizer] * shape.adapter
    if shape.optimizer == "offload_adamw":
        return 12.0 * shape.parameters
    if shape.optimizer == "adamw":
        return (12.0 if shape.weight_bytes == 2 else 8.0) * shape.parameters
    quantised = shape.parameters - shape.fp32_state
    scales = quantised / shape.block if shape.scales is None else shape.scales
    return 2 * quantised + 8 * scales + 8 * shape.fp32_state


def _sampler_bytes(shape: RunShape) -> tuple[float, float]:
    """The sampler's pages, and its copy of the weights. On the CPU a cache goes with its call, and is small."""
    if not shape.sampler_rows or shape.device == "cpu":
        return 0.0, 0.0
    positions = shape.sampler_rows * -(-shape.sampler_length // SAMPLER_PAGE) * SAMPLER_PAGE
    cache = float(2 * positions * shape.layers * shape.kv_heads * shape.head_dim * shape.weight_bytes)
    if shape.sampler_budget_gb is not None:
        cache = min(cache, shape.sampler_budget_gb * GIB)
    return cache, float(shape.parameters * shape.weight_bytes) if shape.sampler_copy else 0.0


def _layer_bytes(shape: RunShape) -> float:
    """What one block keeps for its backward, bytes a token, over the operations of align.model.

    Norms: on the CPU the normalised input in fp32 and its scale, elsewhere the input and its scale; their output, which the projections
    keep. Attention: q, k, v, the output, fp32 log-sum-exp a head; of packed rows on the CPU twice. MLP: the gate, its SiLU, up and
    the product.
    """
    if shape.layer_bytes_per_token is not None:
        return shape.layer_bytes_per_token
    size, wide = shape.weight_bytes, shape.hidden
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = (4 if shape.device == "cpu" else size) * wide + 4 + size * wide
    attention: float = size * 2 * (query + key) + 4 * shape.heads
    if shape.forward_impl == "cpu_per_document":
        # Rows of their own for the documents, padded; what they are made from and what is taken out of them is kept, too.
        attention = attention * shape.padding + size * 2 * (query + key)
    kept = 3 if shape.compiled and shape.device == "cuda" else 4
    return 2 * norm + attention + size * kept * shape.intermediate


def _final_norm_bytes(shape: RunShape) -> float:
    return shape.tokens * ((4 if shape.device == "cpu" else shape.weight_bytes) * shape.hidden + 4)


def _saved_bytes(shape: RunShape) -> float:
    """Alive between forward and backward of a micro-batch on one rank; of a block that is computed again, its input."""
    again = {"none": 0, "selective": shape.layers // 2, "full": shape.layers}[shape.checkpointing]
    blocks = again * shape.weight_bytes * shape.hidden + (shape.layers - again) * _layer_bytes(shape)
    packed = shape.forward_impl == "cpu_per_document"
    tables = 2 * shape.head_dim * shape.weight_bytes * (shape.tokens if packed else shape.length) + 8 * shape.tokens * packed
    return shape.tokens * blocks + _final_norm_bytes(shape) + (tables if shape.layers else 0)


def _loss_bytes(shape: RunShape) -> float:
    """align.objectives.chunked_cross_entropy at its largest.

    The trained rows with their gradients and targets, one chunk of logits, the head's gradient.
    """
    size, head = shape.weight_bytes, 0 if shape.adapter else shape.vocabulary * shape.hidden
    rows = shape.trained_share * shape.tokens
    chunk = shape.logits_chunk or (max(256, _CHUNK_ELEMENTS // shape.vocabulary) if shape.vocabulary else 0)
    several = rows > chunk
    logits = min(rows, chunk) * shape.vocabulary * (4 if size == 4 else 4 + size)  # fp32, and again in the weights' dtype
    return rows * (2 * size * shape.hidden + 28) + logits + head * (4 + size if several else size)


def _gathered_bytes(shape: RunShape) -> float:
    """FSDP2 with resharding: two blocks' whole weights, one block's whole gradients, and the root's (embedding and head)."""
    if shape.ranks == 1 or not shape.layers:
        return 0.0
    ends = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    block = max(shape.parameters - ends, 0) / shape.layers
    return shape.weight_bytes * (3 * block + ends) * (1 - 1 / shape.ranks)


def _phases(shape: RunShape, weights: float, grads: float, state: float) -> dict[str, float]:
    """Device bytes of one rank at the moments of a step where memory can be largest.

    Without accumulation the gradients come as the activations go; with it they are alive throughout.
    """
    size, tokens, wide = shape.weight_bytes, shape.tokens, shape.hidden
    head = 0 if shape.adapter else shape.vocabulary * wide * size  # the head's gradient is made in the loss's forward
    block_grads = max(shape.parameters * size - head * (1 if shape.tied else 2), 0) / shape.layers / shape.ranks if shape.layers else 0
    if shape.adapter:
        block_grads = grads / max(shape.layers, 1)
    fixed = weights + state
    during = fixed + (grads if shape.accumulation > 1 else 0)
    saved, layer = _saved_bytes(shape), _layer_bytes(shape) * tokens
    rows = shape.trained_share * tokens * size * wide
    norm = (12 if shape.device == "cpu" else 2 * size) * wide * tokens
    # In the MLP's backward: the residual's gradient, those of gate and up, the down projection's weight gradient.
    working = tokens * size * (wide + 2 * shape.intermediate) + (0 if shape.adapter else shape.intermediate * wide * size)
    again = layer if shape.checkpointing == "full" else 0
    late = grads if shape.accumulation > 1 else max(grads - block_grads - (0 if shape.tied else head / shape.ranks), 0)
    if shape.in_backward:
        grads = late = max(block_grads, head / shape.ranks)  # no others are alive
    one = layer + (size * wide * tokens if shape.checkpointing == "full" else 0)
    return {
        "loss": during + saved + size * wide * tokens + _loss_bytes(shape),
        "loss backward": during + saved + 2 * head + 2 * rows,
        "last norm backward": during + saved + head + norm + 2 * size * wide * tokens,
        "last block backward": during + saved - _final_norm_bytes(shape) + head + working + again,
        "first block backward": fixed + late + one + working,
        # A gradient that is there already (the tied head's, an earlier micro-batch's) is added to.
        "embedding backward": fixed + grads + (head if shape.tied or shape.accumulation > 1 else 0) + size * wide * tokens,
        "optimizer step": fixed + grads + _optimizer_working(shape),
    }


def _optimizer_working(shape: RunShape) -> float:
    """Temporaries of a step. The Triton kernel has none; torch's AdamW holds about two copies of a parameter, on CUDA of all (foreach)."""
    if shape.optimizer == "adamw8bit":
        together = min(shape.largest_group or shape.parameters, _OPTIMIZER_RUN)
        return _OPTIMIZER_BYTES * together if shape.device == "cpu" else 0.0
    if shape.optimizer == "adamw":
        return 8.0 * shape.largest if shape.device == "cpu" else 4.0 * shape.parameters / shape.ranks
    return 0.0


def _save_transient(shape: RunShape, device_state: float) -> float:
    """Host memory that saving adds, over all ranks.

    Rank 0 gathering the optimizer: three copies (the ranks' parts, the joined state, the file's). Files per rank: `snapshot` copies
    each rank's state (and weights) once, `stream` one parameter at a time, and nothing where the state is host memory already.
    """
    if shape.optimizer == "offload_adamw":
        return 0.0
    weights = float(shape.parameters * shape.weight_bytes) if shape.snapshot_weights and shape.save_mode == "snapshot" else 0.0
    if not shape.per_rank_optimizer_state and shape.ranks > 1:
        return shape.gather_copies * device_state + weights
    if shape.save_mode == "snapshot":
        return device_state + weights
    return 0.0 if shape.device == "cpu" else float(shape.largest * shape.weight_bytes * shape.ranks)
