"""Round trips, fallbacks, keep-N, and what is refused."""

import doctest
import errno
import json
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_cases import TOKENIZER, Model, assert_loads, assert_same, names, tokenizer_in, trained, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from align.checkpoint import CheckpointError, CheckpointWarning, _files, _load, _save, latest, load, newest, save
from align.checkpoint._tensor_file import _NAMES, Later, write_tensors


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_in(tmp_path / "tokenizer")


# What is written and read.


@pytest.mark.parametrize("per_rank", [True, False])
def test_round_trip(tmp_path, tokenizer, per_rank):
    path = write(tmp_path / "c", 60, tokenizer_files=tokenizer, per_rank_optimizer_state=per_rank, metric=0.5)
    optimizer_file = "optimizer-00000-of-00001" if per_rank else "optimizer"
    assert path == tmp_path / "c" / "step-000060"
    assert names(path) == sorted(
        ["config.json", "manifest.json", "model.safetensors", f"{optimizer_file}.json", f"{optimizer_file}.safetensors"]
        + ["trainer.json", "trainer.safetensors", *TOKENIZER]
    )
    assert latest(tmp_path / "c") == path
    checkpoint = load(path)
    assert (checkpoint.step, checkpoint.metric, checkpoint.trainer_state) == (60, 0.5, {"step": 60, "seed": 0})
    assert torch.equal(checkpoint.tensors["rng"], torch.arange(5, dtype=torch.uint8))
    assert checkpoint.model_config == {"model_type": "test", "dtype": "float32", "unknown_key": [1]}
    assert_loads(path, 0)
    assert_same(load_file(path / "model.safetensors"), dict(sorted(trained()[0].state_dict().items())))


def test_optimizer_file_names_parameters_shapes_and_rows(tmp_path):
    document = json.loads((write(tmp_path, 1) / "optimizer-00000-of-00001.json").read_text())
    assert document["parameters"]["up.weight"] == {"shape": [4, 3], "rows": [0, 4]}
    with safe_open(tmp_path / "step-000001/optimizer-00000-of-00001.safetensors", "pt") as file:
        assert "up.weight.exp_avg_sq" in file.keys()  # noqa: SIM118


def test_two_groups_and_tuples_survive(tmp_path):
    model, optimizer = trained(groups=2)
    path = write(tmp_path, 1, model=model, optimizer=optimizer)
    other, fresh = trained(groups=2, steps=0)
    load(path).load_optimizer(fresh, other)
    assert_same(optimizer.state_dict(), fresh.state_dict())
    with pytest.raises(CheckpointError, match="grouped otherwise"):
        load(path).load_optimizer(torch.optim.AdamW(other.parameters()), other)


def test_a_model_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(_save, "SHARD_BYTES", 60)
    path = write(tmp_path, 1)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (12 + 4 + 8)
    assert set(index["weight_map"]) == set(Model().state_dict())
    for name, file in index["weight_map"].items():
        assert name in load_file(path / file)
    assert len(set(index["weight_map"].values())) == 2
    assert_loads(path, 0)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(_NAMES)), st.lists(st.integers(0, 3), max_size=3), st.booleans()),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
)
def test_tensor_files_are_what_the_safetensors_package_reads(tmp_path_factory, layout, metadata):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (dtype, shape, transposed) in layout.items():
        whole = torch.randint(0, 2, shape, generator=generator).to(dtype)
        tensors[name] = whole.t() if transposed and len(shape) == 2 else whole  # not contiguous
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    written = write_tensors(path, {name: Later.of(tensor) for name, tensor in tensors.items()}, metadata)
    assert written.bytes == path.stat().st_size
    with safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == metadata
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == tensor.dtype and torch.equal(read.double(), tensor.double())


def test_big_tensors_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "PIECE", 100)
    tensor = torch.arange(1000)
    write_tensors(tmp_path / "x", {"a": Later.of(tensor)}, {})
    assert torch.equal(load_file(tmp_path / "x")["a"], tensor)


# Finding one that is whole.


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change(name, value, path):
    data = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(data | {name: value}))


WRONG = (("step", "60"), ("step", None), ("order", [1]), ("metric", "1"), ("files", [1]), ("files", {"config.json": 1}),
         ("files", {"config.json": {"bytes": "1", "sha256": "0"}}), ("files", {"config.json": {"bytes": 1}}))  # fmt: skip
DAMAGES = {
    "an empty directory": lambda path: [file.unlink() for file in path.iterdir()],
    "weights truncated": lambda path: truncate(path / "model.safetensors"),
    "one bit of the optimizer": lambda path: flip(path / "optimizer-00000-of-00001.safetensors"),
    "optimizer truncated": lambda path: truncate(path / "optimizer-00000-of-00001.safetensors"),
    "config gone": lambda path: (path / "config.json").unlink(),
    "manifest torn": lambda path: truncate(path / "manifest.json") or truncate(path / "manifest.json"),
    "manifest of another shape": lambda path: (path / "manifest.json").write_text("[1]"),
    "manifest nested deeply": lambda path: (path / "manifest.json").write_text("[" * 100_000),
    **{f"manifest with {name} {value!r}": partial(change, name, value) for name, value in WRONG},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_falls_back_to_the_newest_whole_one_and_says_so(tmp_path, damage):
    for step in (20, 40, 60):
        write(tmp_path, step, seed=step)
    DAMAGES[damage](tmp_path / "step-000060")
    with pytest.warns(CheckpointWarning, match=r"step-000060.*falling back to step-000040"):
        assert latest(tmp_path) == tmp_path / "step-000040"
    with pytest.raises(CheckpointError, match="step-000060"):
        load(tmp_path / "step-000060")
    DAMAGES[damage](tmp_path / "step-000040")
    DAMAGES[damage](tmp_path / "step-000020")
    with pytest.raises(CheckpointError, match=r"3 checkpoint.* none is whole"):
        latest(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_for_its_model_the_newest_is_taken_or_refused_with_the_newest_whole_one(tmp_path, damage):
    for step in (20, 40, 60):
        write(tmp_path, step, seed=step)
    assert newest(tmp_path, setting="model.path") == tmp_path / "step-000060"
    DAMAGES[damage](tmp_path / "step-000040")
    assert newest(tmp_path, setting="model.path") == tmp_path / "step-000060", "an older one is not asked about"
    DAMAGES[damage](tmp_path / "step-000060")
    if "optimizer" in damage:  # a model does without
        assert newest(tmp_path, setting="model.path") == tmp_path / "step-000060"
        return
    told = {"weights truncated": r"model\.safetensors has \d+ bytes, its manifest says \d+", "config gone": "config.json is missing"}
    with pytest.raises(CheckpointError, match=told.get(damage, "manifest.json")) as caught:
        newest(tmp_path, setting="model.path")
    assert str(caught.value).endswith(f"; the newest whole one is older: model.path={tmp_path / 'step-000020'}")
    assert str(caught.value).startswith(str(tmp_path / "step-000060"))
    DAMAGES[damage](tmp_path / "step-000020")
    with pytest.raises(CheckpointError, match="no older one is whole; name another model"):
        newest(tmp_path, setting="model.path")


def test_for_its_model_too_the_newest_is_what_was_written_last(tmp_path):
    for step in (999_999, 1_000_000, 7):
        write(tmp_path, step)
    assert newest(tmp_path, setting="model.path").name == latest(tmp_path).name == "step-000007"


def test_none_where_there_is_none(tmp_path):
    assert latest(tmp_path) is None and newest(tmp_path, setting="x") is None
    assert latest(tmp_path / "absent") is None and newest(tmp_path / "absent", setting="x") is None


def test_optimizer_files_that_somebody_removed_are_refused_by_name(tmp_path):
    write(tmp_path, 20)
    path = write(tmp_path, 40)
    (path / "optimizer-00000-of-00001.safetensors").unlink()
    assert latest(tmp_path) == path
    assert not load(path).has_optimizer_state and load(tmp_path / "step-000020").has_optimizer_state
    model, optimizer = trained(steps=0)
    with pytest.raises(CheckpointError, match=r"optimizer state.*--allow-change optimizer\.state") as caught:
        load(path).load_optimizer(optimizer, model)
    assert caught.value.exit_code == 2
    load(path).load_model(model)


# Which stay.


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_the_last_written_and_the_best_stay(tmp_path_factory, saves, keep):
    directory = tmp_path_factory.mktemp("keep")
    model, optimizer = trained(steps=0)
    alive = {}  # step: metric, the first written first
    for step, metric in saves:
        save(
            directory, step, model=model, optimizer=optimizer, tokenizer_files=None, trainer_state={}, tensors={}, keep=keep, metric=metric
        )
        alive.pop(step, None)
        alive[step] = metric
        scored = [other for other in alive if alive[other] is not None]
        # On a tie the later one is the best.
        best = max(reversed(scored), key=alive.get) if scored else None
        alive = {other: value for other, value in alive.items() if other in (*list(alive)[-keep:], best)}
        assert names(directory) == [f"step-{other:06d}" for other in sorted(alive)]
        assert latest(directory).name == f"step-{step:06d}"


def test_a_run_resumed_from_an_older_step_goes_on_from_its_own(tmp_path):
    for step in (5, 10):
        write(tmp_path, step, seed=step)
    write(tmp_path, 7, seed=7, keep=2)  # resumed at 5 where 10 lies
    assert names(tmp_path) == ["step-000007", "step-000010"]
    assert latest(tmp_path).name == "step-000007"


def test_other_directories_are_left_alone(tmp_path):
    for name in ("step-best", "notes", ".step-x.old", "step-000003"):
        (tmp_path / name).mkdir()
    write(tmp_path, 1, keep=1)
    write(tmp_path, 2, keep=1)
    assert names(tmp_path) == [".step-x.old", "notes", "step-000002", "step-000003", "step-best"]


# What is refused.


def test_no_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    write(tmp_path, 1)
    monkeypatch.setattr(_files, "free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"has 0\.00 MiB free and the checkpoint takes \d+\.\d\d MiB; nothing was written"):
        write(tmp_path, 2)
    assert names(tmp_path) == ["step-000001"]


def test_free_bytes_of_a_directory_to_come(tmp_path):
    assert _files.free_bytes(tmp_path / "a" / "b") > 0


def test_a_newer_format_is_refused_and_an_older_migrated(tmp_path, monkeypatch):
    path = write(tmp_path, 1)
    monkeypatch.setattr(_load, "FORMAT", 0)
    with pytest.raises(CheckpointError, match="format 1 and this version reads up to 0"):
        load(path)
    monkeypatch.setattr(_load, "FORMAT", 2)
    monkeypatch.setattr(_load, "MIGRATIONS", {1: lambda document: document.setdefault("state", {}).update(migrated=True)})
    assert load(path).trainer_state["migrated"]


@pytest.mark.parametrize("missing", TOKENIZER)
def test_tokenizer_files_all_or_none_or_the_fallback(tmp_path, tokenizer, missing, monkeypatch):
    vendored = tokenizer_in(tmp_path / "vendored")
    (vendored / "tokenizer.json").write_text("the vendored one")
    read = Path.read_bytes

    def fails(path):
        if path == tokenizer / missing:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.warns(CheckpointWarning, match=r"NONE of them"):
        path = write(tmp_path / "c", 1, tokenizer_files=tokenizer)
    assert not set(names(path)) & set(TOKENIZER)
    assert latest(tmp_path / "c") == path
    with pytest.warns(CheckpointWarning, match=r"Input/output error.*the checkpoint has those of .*vendored"):
        path = write(tmp_path / "c", 2, tokenizer_files=tokenizer, fallback_tokenizer=vendored)
    assert set(names(path)) >= set(TOKENIZER)
    assert (path / "tokenizer.json").read_text() == "the vendored one"


def test_a_directory_without_tokenizer(tmp_path):
    with pytest.warns(CheckpointWarning, match=r"no tokenizer\.json"):
        write(tmp_path / "c", 1, tokenizer_files=tmp_path)


def test_state_that_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="keep is 0"):
        write(tmp_path, 1, keep=0)
    with pytest.raises(CheckpointError, match="JSON"):
        write(tmp_path, 1, trainer_state={"a": {1, 2}})
    with pytest.raises(CheckpointError, match=r"torch\.complex64"):
        write(tmp_path, 1, tensors={"a": torch.zeros(1, dtype=torch.complex64)})
    model, optimizer = trained()
    optimizer.state[model.up.weight]["odd"] = object()
    with pytest.raises(CheckpointError, match=r"up\.weight\.odd is a object"):
        write(tmp_path, 1, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="belongs to no module"):
        write(tmp_path, 1, optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(7))]))
    assert names(tmp_path) == []


def test_an_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not saved: Not a directory"):
        write(tmp_path / "file" / "c", 1)


def test_another_model_is_refused_by_weight(tmp_path):
    path = write(tmp_path, 1)
    other = Model()
    other.down = torch.nn.Linear(4, 3, bias=False)
    with pytest.raises(CheckpointError, match=r"down\.weight is torch\.float32 \(2, 4\)"):
        load(path).load_model(other)
    with pytest.raises(CheckpointError, match=r"bfloat16"):
        load(path).load_model(Model(dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"optimizer\.state: down\.weight"):
        load(path).load_optimizer(torch.optim.AdamW(other.parameters()), other)
    other.extra = torch.nn.Linear(1, 1)
    other.down = Model().down
    with pytest.raises(CheckpointError, match=r"no weight extra\.bias"):
        load(path).load_model(other)
    with pytest.raises(CheckpointError, match=r"extra\.bias is only in the run"):
        load(path).load_optimizer(torch.optim.AdamW(other.parameters()), other)
    del other.extra, other.up
    with pytest.raises(CheckpointError, match=r"holds a weight up\."):
        load(path).load_model(other)


def test_names_that_the_optimizer_brings_itself(tmp_path):
    model = Model()
    head = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([("head", head), *model.named_parameters()])
    path = write(tmp_path, 1, model=model, optimizer=optimizer)
    assert "head" in json.loads((path / "optimizer-00000-of-00001.json").read_text())["parameters"]


def test_readme(tmp_path, monkeypatch):
    readme = Path(__file__).parents[1] / "README.md"
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert doctest.testfile(str(readme), module_relative=False).failed == 0
