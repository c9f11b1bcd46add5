"""The training loop: exact accumulation over any number of ranks, exact resume, a stop at any time."""

from align.train._config import (
    CheckpointConfig,
    EvalConfig,
    LaunchConfig,
    LoraConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    TrainerConfig,
    validate,
)
from align.train._errors import ResumeWarning, TrainError
from align.train._launch import finished, launch, launched, started
from align.train._lora import (
    LoraLinear,
    adapter_config,
    adapter_tensors,
    add_lora,
    load_adapter,
    lora_parameters,
    merge_lora,
    sum_replicated,
)
from align.train._module import SftModule, TrainModule
from align.train._offload import OffloadAdamW
from align.train._optimizers import AdamW, make_optimizer
from align.train._prepare import prepare, reshard, whole
from align.train._ranks import Ranks, join, leave
from align.train._resume import identity, refuse_changes
from align.train._schedule import learning_rate
from align.train._state import find_latest
from align.train._trainer import FitResult, Trainer, to_device

__all__ = [
    "AdamW",
    "CheckpointConfig",
    "EvalConfig",
    "FitResult",
    "LaunchConfig",
    "LoraConfig",
    "LoraLinear",
    "OffloadAdamW",
    "OptimizerConfig",
    "Ranks",
    "ResumeWarning",
    "ScheduleConfig",
    "SftModule",
    "TrainConfig",
    "TrainError",
    "TrainModule",
    "Trainer",
    "TrainerConfig",
    "adapter_config",
    "adapter_tensors",
    "add_lora",
    "find_latest",
    "finished",
    "identity",
    "join",
    "launch",
    "launched",
    "learning_rate",
    "leave",
    "load_adapter",
    "lora_parameters",
    "make_optimizer",
    "merge_lora",
    "prepare",
    "refuse_changes",
    "reshard",
    "started",
    "sum_replicated",
    "to_device",
    "validate",
    "whole",
]
