"""AdamW with block-wise 8-bit moments, as a torch.optim.Optimizer."""

import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from align.optim8bit import _layout, _noise, _state, _torch_backend, quant
from align.optim8bit._layout import Bucket, Groups, Member
from align.optim8bit._torch_backend import Hyper
from align.optim8bit.quant import OptimizerError

# Squares of larger gradients overflow the fp32 second moment; a norm above it counts as non-finite.
MAX_NORM = 1e18
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile's and checkpoint_wrapper's parts of a name


class Live(NamedTuple):
    """Members of one bucket with gradients, the same step count and the same shard groups."""

    bucket: Bucket
    members: list[Member]
    grads: list[torch.Tensor]  # local parts
    prepared: Any  # by the bucket's backend


class NonFiniteGradient(RuntimeError):
    """Raised by step() with on_nonfinite="raise"; nothing has been changed."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with block-wise 8-bit states (Dettmers et al. 2022, arXiv:2110.02861) and no master copy.

    params: parameters, (name, parameter) pairs such as model.named_parameters(), or dicts of them with their own lr, betas, eps
    and weight_decay. Give names: they key the rounding noise and the saved state (torch.compile's and checkpoint wrappers' parts
    are dropped from them); unnamed parameters are called "0", "1", ... in order.
    lr, betas, eps, weight_decay: as in torch.optim.AdamW; the decay is decoupled, p *= 1 - lr * weight_decay.
    block_size: largest quantiser block, a power of two from 64 to 4096; see `block_for` for the one a parameter gets.
    min_8bit_elems: parameters with fewer elements (in full, not in this rank's shard) keep fp32 states.
    max_grad_norm: clip the global gradient norm to this inside the step; None does not clip.
    stochastic_rounding: round bf16 parameters stochastically; the noise is a function of seed, name, applied step and index.
    backend: "torch" is the reference, "triton" the fused kernel, "auto" Triton for CUDA parameters.
    ieee: make the Triton backend use IEEE division and square root and no contraction: the torch backend's bits, but slower.
    on_nonfinite: "skip" leaves parameters and state as they are, on every rank alike, and counts in `.skipped`; "raise" raises
    NonFiniteGradient.

    Parameters are float32 or bfloat16; DTensors placed Shard(0) or Replicate are stepped shard by shard without communication but
    for the norm (one scalar). Make the optimizer after fully_shard and after moving the model. Raises OptimizerError (a ValueError).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        block_size: int = 2048,
        min_8bit_elems: int = 4096,
        max_grad_norm: float | None = None,
        stochastic_rounding: bool = True,
        backend: Literal["auto", "triton", "torch"] = "auto",
        seed: int = 0,
        ieee: bool = False,
        on_nonfinite: Literal["skip", "raise"] = "skip",
    ):
        quant.check_block_size(block_size)
        if backend not in ("auto", "triton", "torch"):
            raise OptimizerError(f"backend {backend!r} is unknown; use auto, triton or torch")
        if on_nonfinite not in ("skip", "raise"):
            raise OptimizerError(f"on_nonfinite {on_nonfinite!r} is unknown; use skip or raise")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise OptimizerError(f"max_grad_norm {max_grad_norm!r} is not above 0; None turns clipping off")
        self.block_size, self.min_8bit_elems, self.max_grad_norm = block_size, int(min_8bit_elems), max_grad_norm
        self.stochastic_rounding, self.seed, self.ieee = bool(stochastic_rounding), int(seed), bool(ieee)
        self.on_nonfinite, self.skipped = on_nonfinite, 0
        self._backend = backend
        self._buckets: list[Bucket] = []
        self._members: dict[str, tuple[Bucket, Member]] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters (or (name, parameter) pairs) under "params" with their own hyperparameters, and allocate their states."""
        group = {**self.defaults, **param_group}
        pairs = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        taken = {id(m.param) for _, m in self._members.values()}
        named: dict[str, torch.Tensor] = {}
        for pair in pairs:
            name, param = pair if isinstance(pair, tuple) else (str(len(self._members) + len(named)), pair)
            for part in WRAPPERS:
                name = name.replace(part, "")
            if not isinstance(param, torch.Tensor) or not param.is_leaf:
                raise OptimizerError(f"parameter {name} is not a leaf tensor but {type(param).__name__}; pass the module's parameters")
            if name in named or name in self._members or id(param) in taken:
                raise OptimizerError(f"parameter {name} is given twice; a name and a tensor belong to one group only")
            named[name] = param
            taken.add(id(param))
        group["params"], group["param_names"] = list(named.values()), list(named)
        _check_hyper(group)
        members = [_layout.make_member(name, p, self.block_size, self.min_8bit_elems) for name, p in named.items()]
        by_kind: dict[tuple[int, torch.dtype, torch.device], list[Member]] = {}
        for member in members:
            by_kind.setdefault((member.block, member.param.dtype, member.param.device), []).append(member)
        for kind in by_kind.values():
            backend = self._backend_for(kind[0].param.device)
            bucket = Bucket(len(self.param_groups), kind, backend, backend.granule(kind[0].block))
            self._buckets.append(bucket)
            self._members.update({m.name: (bucket, m) for m in kind})
        self.param_groups.append(group)

    def _backend_for(self, device: torch.device) -> ModuleType:
        if self._backend == "torch" or (self._backend == "auto" and device.type != "cuda"):
            return _torch_backend
        try:
            from align.optim8bit import _triton_backend
        except ImportError as error:
            if self._backend == "auto":
                return _torch_backend
            raise OptimizerError(f'backend "triton" can\'t be imported ({error}); install triton or use backend "torch"') from error
        _triton_backend.check_device(device)
        return _triton_backend

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer's, whose first call imports torch._dynamo (seconds)."""
        for _, member in self._members.values():
            if set_to_none:
                member.param.grad = None
            elif member.param.grad is not None:
                member.param.grad = member.param.grad.detach().zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> float:  # type: ignore[override]
        """One step with the gradients in `.grad`; parameters without one are left alone, their step count too.

        Returns the global L2 norm of the gradients before clipping, over all ranks. The one host synchronisation of the step is
        for that number: every rank sees the same and so clips, skips or raises alike.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        live = [part for bucket in self._buckets for part in _live(bucket)]
        norm = self._global_norm(live)
        if not norm <= MAX_NORM:
            if self.on_nonfinite == "raise":
                raise NonFiniteGradient(f"gradient norm is {norm}; {_culprits(live)}")
            self.skipped += 1
            return norm
        scale = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        for part in live:
            count = part.members[0].step + 1
            part.bucket.backend.update(part.bucket, part.prepared, self._hyper(self.param_groups[part.bucket.group], count, scale))
            for member in part.members:
                member.step = count
        return norm

    def _hyper(self, group: dict[str, Any], t: int, scale: float) -> Hyper:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return Hyper(
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            decay=1.0 - lr * group["weight_decay"],
            step_size=lr / (1.0 - beta1**t),
            root_bias2=(1.0 - beta2**t) ** -0.5,
            grad_scale=scale,
            stochastic=self.stochastic_rounding,
            words=_noise.step_words(self.seed, t),
            ieee=self.ieee,
        )

    def _global_norm(self, live: list[Live]) -> float:
        """Sums of squares in float64, one all-reduce of a scalar for every set of shard groups; replicas are counted once."""
        sums: dict[Groups, torch.Tensor] = {}
        for part in live:
            square, groups = part.bucket.backend.square_sum(part.bucket, part.prepared), part.members[0].groups
            sums[groups] = sums[groups] + square.to(sums[groups].device) if groups in sums else square
        for bucket, member in self._members.values():
            if member.groups and member.groups not in sums:  # no gradient here: take part in the reduction all the same
                sums[member.groups] = torch.zeros((), dtype=torch.float64, device=bucket.device)
        order = dict.fromkeys(member.groups for _, member in self._members.values())  # the same on every rank
        for groups in order:
            for group in groups:
                dist.all_reduce(sums[groups], group=group)
        parts = list(sums.values())
        return math.sqrt(sum(torch.stack([p.to(parts[0].device) for p in parts]).tolist())) if parts else 0.0

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank's device: 2 + 8 / block for each 8-bit element, 8 for each fp32 one, and padding."""
        return sum(t.numel() * t.element_size() for bucket in self._buckets for t in bucket.state.values())

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. Everything but the tensors is JSON; the tensors share memory with the optimizer, clone to keep.

        {"kind", "format", "settings", "param_groups": [{"params": names, lr, ...}], "state": {name: {"step", "full_shape", "rows":
        [first, end) of dim 0, "block", "dtype", and the tensors m_codes, m_absmax, v_codes, v_absmax, or m, v}}}.
        """
        settings = {
            "block_size": self.block_size,
            "min_8bit_elems": self.min_8bit_elems,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": self.seed,
            "skipped": self.skipped,
            "map": quant.map_digest(),
        }
        groups = [{**group, "betas": list(group["betas"]), "params": list(group["param_names"])} for group in self.param_groups]
        for group in groups:
            del group["param_names"]
        entries = {name: _state.entry(bucket, member) for name, (bucket, member) in self._members.items()}
        return {"kind": _state.KIND, "format": _state.FORMAT, "settings": settings, "param_groups": groups, "state": entries}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore bit-exactly a state of this rank, or of any rows that include this rank's (`merge_state_dicts` of all ranks).

        Hyperparameters, seed and the rounding mode come from the state. Raises OptimizerError before anything is changed when a
        parameter is missing or unknown, or differs in shape, block size, dtype or map.
        """
        _state.check_header(state_dict)
        names = [list(g["params"]) for g in state_dict["param_groups"]]
        mine = [g["param_names"] for g in self.param_groups]
        for saved, own in zip(names + [[]] * (len(mine) - len(names)), mine + [[]] * (len(names) - len(mine)), strict=True):
            for name in own:
                if name not in saved or name not in state_dict["state"]:
                    raise OptimizerError(f"optimizer state lacks parameter {name} in its group; it has {len(state_dict['state'])} others")
            for name in saved:
                if name not in own:
                    raise OptimizerError(f"optimizer state has parameter {name}, which is not in this optimizer's group")
        for name, (bucket, member) in self._members.items():
            _state.check_entry(name, state_dict["state"][name], bucket, member)
        for name, (bucket, member) in self._members.items():
            _state.copy_entry(state_dict["state"][name], bucket, member)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"}, betas=tuple(saved["betas"]))
        settings = state_dict["settings"]
        self.seed, self.skipped, self.stochastic_rounding = settings["seed"], settings["skipped"], settings["stochastic_rounding"]


def _check_hyper(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    for name, value, good in (
        ("lr", group["lr"], group["lr"] >= 0),
        ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1),
        ("eps", group["eps"], group["eps"] > 0),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0),
    ):
        if not good:
            raise OptimizerError(f"{name} {value!r} is out of range: lr and weight_decay are at least 0, betas in [0, 1), eps above 0")


def _live(bucket: Bucket) -> list[Live]:
    """The bucket's members that have a gradient, apart by step count and shard groups: one part but for rare cases."""
    parts: dict[tuple[int, Groups], tuple[list[Member], list[torch.Tensor]]] = {}
    for member in bucket.members:
        param: Any = member.param  # a DTensor has more than torch.Tensor's type says
        grad = param.grad
        if grad is None:
            continue
        if _layout.is_dtensor(grad) and grad.placements != param.placements:
            places = f"{grad.placements}, its parameter {param.placements}"
            raise OptimizerError(f"gradient of {member.name} is placed {places}; reduce it first")
        if grad.is_sparse or grad.device != bucket.device:
            raise OptimizerError(f"gradient of {member.name} is {grad.layout} on {grad.device}; a dense one on {bucket.device} is needed")
        members, grads = parts.setdefault((member.step, member.groups), ([], []))
        members.append(member)
        grads.append(_layout.local(grad))
    return [Live(bucket, members, grads, bucket.backend.prepare(bucket, members, grads)) for members, grads in parts.values()]


def _culprits(live: list[Live]) -> str:
    pairs = [pair for part in live for pair in zip(part.members, part.grads, strict=True)]
    names = [member.name for member, grad in pairs if not torch.isfinite(grad).all()]
    return f"non-finite on this rank: {', '.join(names[:3]) or 'none'}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
