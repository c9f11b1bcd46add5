"""Whose folder a path on the command line is relative to."""

from pathlib import Path

import pytest

from align.config import ConfigError, caller_path, workspace_root


def test_paths_are_the_callers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    monkeypatch.delenv("BUILD_WORKSPACE_DIRECTORY", raising=False)
    assert caller_path("a/b") == tmp_path / "a/b" and workspace_root() == tmp_path
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", "/caller")
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", "/workspace/of")
    monkeypatch.setenv("HOME", "/home/me")
    assert caller_path("a/b") == Path("/caller/a/b") and caller_path("/x") == Path("/x")
    assert caller_path("~/a") == Path("/home/me/a") and workspace_root() == Path("/workspace/of")
    with pytest.raises(ConfigError, match="no such home"):
        caller_path("~nobody-of-that-name/a")
    with pytest.raises(ConfigError, match=r"^'a\\x00b' has a null byte"):
        caller_path("a\0b")
