"""The training loop: exact accumulation, exact resume, a stop at any time."""

from align.train._config import CheckpointConfig, EvalConfig, OptimizerConfig, ScheduleConfig, TrainConfig, TrainerConfig, validate
from align.train._errors import ResumeWarning, TrainError
from align.train._module import SftModule, TrainModule
from align.train._optimizers import AdamW, make_optimizer
from align.train._resume import identity, refuse_changes
from align.train._schedule import learning_rate
from align.train._trainer import FitResult, Trainer, to_device

__all__ = [
    "AdamW",
    "CheckpointConfig",
    "EvalConfig",
    "FitResult",
    "OptimizerConfig",
    "ResumeWarning",
    "ScheduleConfig",
    "SftModule",
    "TrainConfig",
    "TrainError",
    "TrainModule",
    "Trainer",
    "TrainerConfig",
    "identity",
    "learning_rate",
    "make_optimizer",
    "refuse_changes",
    "to_device",
    "validate",
]
