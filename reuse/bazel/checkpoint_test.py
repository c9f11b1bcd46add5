"""A caller's own model and optimizer are saved and come back to the bit."""

import dataclasses
import tempfile

import torch

from align.checkpoint import latest, load, save


@dataclasses.dataclass(frozen=True)
class Config:
    """All that align.checkpoint asks of a model's configuration."""

    dtype: str = "float32"

    def with_dtype(self, dtype):
        return dataclasses.replace(self, dtype=dtype)

    def to_hf(self):
        return {"model_type": "mine", "dtype": self.dtype}


def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    model.config = Config()
    return model, torch.optim.AdamW(model.parameters())


model, optimizer = make(0)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
folder = tempfile.mkdtemp()
save(folder, 60, model=model, optimizer=optimizer, tokenizer_files=None, trainer_state={"step": 60}, tensors={}, keep=2)
other, other_optimizer = make(1)
found = load(latest(folder))
found.load_model(other)
found.load_optimizer(other_optimizer, other)
assert found.trainer_state == {"step": 60}
assert torch.equal(other.weight, model.weight)
for a, b in ((model, optimizer), (other, other_optimizer)):
    b.zero_grad()
    a(torch.ones(1, 8)).square().sum().backward()
    b.step()
assert torch.equal(other.weight, model.weight)
