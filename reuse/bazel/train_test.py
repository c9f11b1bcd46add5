"""A stranger's own loader feeds a model that learns a row by heart, with a checkpoint at the end."""

import dataclasses
import tempfile

import torch

from align.model import ModelConfig, init
from align.tracking import Progress, RunDir
from align.train import OptimizerConfig, SftModule, TrainConfig, Trainer, TrainerConfig


@dataclasses.dataclass
class Batch:
    """One micro-batch, (B, T) each."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor


@dataclasses.dataclass
class Step:
    """One optimizer step."""

    micro_batches: list
    trained_tokens: int
    tokens: int
    documents: list
    epoch: float


class Counting:
    """The same row for ever: 0, 1, 2, …"""

    digest = "counting"
    taken = 0

    def next_step(self):
        self.taken += 1
        ids = torch.arange(12).repeat(2, 1)
        batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(2, 11, dtype=torch.bool))
        return Step([batch] * 2, 44, 48, [0, 1, 2, 3], float(self.taken))

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state, *, allow_change=()):
        self.taken = state["taken"]


config = TrainerConfig(train=TrainConfig(max_steps=60, global_batch=4, micro_batch=2, threads=1), optimizer=OptimizerConfig(lr=0.01))
size = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
run = RunDir.create(tempfile.mkdtemp() + "/run", config_toml="", env={})
progress = Progress(60, every=10, stream=None)
result = Trainer(config, SftModule(init(ModelConfig(**size), seed=0)), loader=Counting(), run=run, progress=progress).fit()
assert (result.status, result.steps, result.checkpoint.name) == ("done", 60, "step-000060")
assert result.last_loss < 0.1, result.last_loss
