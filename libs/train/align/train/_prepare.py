"""What becomes of a model before it is trained: recomputation, compilation, sharding."""

from __future__ import annotations

import os

import torch
from torch import nn

from align.model import Decoder, lay_side_by_side
from align.train._config import TrainConfig, TrainerConfig
from align.train._lora import add_lora, lora_layers, lora_parameters, merged_weights
from align.train._ranks import Ranks

COMPILER = "inductor"  # a test takes one that needs no C++ compiler


def prepare(model: nn.Module, config: TrainerConfig, ranks: Ranks) -> None:
    """Sets up every decoder in the model as the configuration says, and shards over the ranks; a second call changes nothing.

    Sharding is FSDP2's, a group for each block and one for the rest; with one rank nothing is wrapped. Gradients are *summed* over the
    ranks: the loss was divided by the units of all of them. An adapter's parameters are not sharded but on every rank.
    """
    if getattr(model, "_align_prepared", False):
        return
    model._align_prepared = True  # type: ignore[assignment]
    if config.lora.rank:
        add_lora(model, config.lora, config.seed)
    blocks = blocks_of(model)
    for module in model.modules():
        if isinstance(module, Decoder):
            module.checkpointing = config.train.checkpointing
            module.fused = config.train.kernels
            if module.fused and ranks.world == 1 and module.output_weight.is_cuda:  # a shard has nothing to lay beside it
                lay_side_by_side(module)
    if config.train.compile:
        for block in blocks:  # the forward alone: the hooks of sharding and recomputation stay outside
            block.forward = torch.compile(block.forward, backend=COMPILER)
    if ranks.world > 1:
        _shard(model, blocks, config.train, ranks)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of every decoder in the model."""
    return [block for module in model.modules() if isinstance(module, Decoder) for block in module.blocks]


def be_deterministic() -> None:
    """Only kernels that give the same bits every time, for this process. cuDNN's attention is not among them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs a pass over all memory and finds no fault of ours
    torch.backends.cuda.enable_cudnn_sdp(False)


def _shard(model: nn.Module, blocks: list[nn.Module], config: TrainConfig, ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (ranks.world,))
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if config.reduce_dtype == "float32" else None)
    adapter = set(lora_parameters(model))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=config.reshard_after_forward, ignored_params=adapter)
    # The head's weight is read outside of the forward, by the loss; so the root's are given up after the backward only.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False, ignored_params=adapter)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def reshard(model: nn.Module) -> None:
    """Gives up gathered weights, so that parameters are the shards again; after a forward that no backward followed."""
    for module in model.modules():
        give_up = getattr(module, "reshard", None)
        if give_up is not None:
            give_up()


def whole(model: Decoder) -> Decoder:
    """A copy with whole weights, adapter merged, for sampling; all ranks call it together. A plain decoder is returned as it is."""
    reshard(model)
    if not lora_layers(model) and not any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return model
    like = model.output_weight
    with torch.device(like.device):
        copy = Decoder(model.config, like.dtype)
    own = copy.state_dict()
    with torch.no_grad():
        for name, weight in merged_weights(model).items():
            own[name].copy_(weight())
    return copy.eval()
