"""download against the hub of the tests: whole or not at all, other formats left, mistakes named."""

import download as stage
import pytest
from hub_server import COMMIT, FILES, REPO, Server


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = Server()
    server.files |= {"model.safetensors": b"w" * 3_000_000, "pytorch_model.bin": b"x", "original/weights.pth": b"y", "config.json": b"{}"}
    for name, value in (("HF_ENDPOINT", server.url), ("ALIGN_CACHE", str(tmp_path / "cache")), ("BUILD_WORKING_DIRECTORY", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path / "workspace"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.close()


def found(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_comes_without_its_other_formats(hub, tmp_path, capsys):
    assert stage.main([REPO]) == 0
    target = tmp_path / "workspace/models/name"
    wanted = {name: data for name, data in hub.files.items() if name not in ("pytorch_model.bin", "original/weights.pth")}
    assert found(target) == wanted
    out = capsys.readouterr()
    assert COMMIT in out.out and f"model.path={target}" in out.out
    assert [path.name for path in target.parent.iterdir()] == ["name"]  # no scratch is left


def test_include_exclude_and_a_data_set(hub, tmp_path):
    assert stage.main([REPO, "to=a", 'include=["*.json", "*.bin"]', "exclude=[]"]) == 0
    assert set(found(tmp_path / "a")) == {"config.json", "pytorch_model.bin"}
    assert stage.main([f"repo={REPO}", "kind=dataset", "to=b", 'include=["data/*"]']) == 0
    assert found(tmp_path / "b") == {"data/train.jsonl.gz": FILES["data/train.jsonl.gz"]}


def test_a_dry_run_lists_and_writes_nothing(hub, tmp_path, capsys):
    assert stage.main([REPO, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "3,000,000  model.safetensors" in out and "pytorch_model.bin" not in out
    assert not (tmp_path / "workspace").exists() and not any("/resolve/" in entry["path"] for entry in hub.log)


def test_a_failed_file_leaves_no_directory_and_the_next_try_gets_the_rest(hub, tmp_path, capsys):
    hub.faults["hub"] = [404]  # the first file that is asked for
    assert stage.main([REPO]) == 2
    assert not (tmp_path / "workspace/models/name").exists() and list((tmp_path / "workspace/models").iterdir()) == []
    assert stage.main([REPO]) == 0 and "model.safetensors" in found(tmp_path / "workspace/models/name")


def test_mistakes_are_named(hub, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    for words, wanted in (
        (["to=there", f"repo={REPO}"], "there already"),
        ([REPO, 'include=["nothing"]'], "none of 8 files is wanted"),
        (["no spaces/x y"], "names no repository"),
        ([], "repo"),
        (["org/other"], "org/other"),
        ([REPO, "--resume"], "goes on by itself"),
    ):
        assert stage.main(words) == 2, words
        assert wanted in capsys.readouterr().err, words
