"""A small model, its optimizer and its checkpoints, for the tests of this library."""

import dataclasses
import functools

import torch

from align.checkpoint import load, save


@dataclasses.dataclass(frozen=True)
class Config:
    dtype: str = "float16"

    def with_dtype(self, dtype):
        return dataclasses.replace(self, dtype=dtype)

    def to_hf(self):
        return {"model_type": "test", "dtype": self.dtype, "unknown_key": [1]}


class Model(torch.nn.Module):
    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        self.config = Config()
        self.up = torch.nn.Linear(3, 4, dtype=dtype)
        self.down = torch.nn.Linear(4, 2, bias=False, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)


def trained(seed=0, steps=2, groups=1):
    model = Model(seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[index::groups]} for index in range(groups)], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model.down(model.up(torch.ones(3))).sum().backward()
        optimizer.step()
    return model, optimizer


trained_once = functools.cache(trained)  # for who only reads


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


def tokenizer_in(directory):
    """A directory with the four files of a tokenizer."""
    directory.mkdir()
    for name in TOKENIZER:
        (directory / name).write_text(name)
    return directory


def write(directory, step, *, seed=0, keep=9, **changes):
    model, optimizer = trained_once(seed)
    arguments = {
        "model": model,
        "optimizer": optimizer,
        "tokenizer_files": None,
        "trainer_state": {"step": step, "seed": seed},
        "tensors": {"rng": torch.arange(5, dtype=torch.uint8)},
        "keep": keep,
    }
    return save(directory, step, **(arguments | changes))


def assert_loads(path, seed):
    """The checkpoint is whole and holds what `write` wrote with this seed."""
    checkpoint = load(path)
    model, optimizer = trained_once(seed)
    other, fresh = trained(seed + 100, steps=0)
    checkpoint.load_model(other)
    checkpoint.load_optimizer(fresh, other)
    assert checkpoint.trainer_state["seed"] == seed
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert_same(optimizer.state_dict(), fresh.state_dict())


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b


def names(directory):
    return sorted(path.name for path in directory.iterdir())
