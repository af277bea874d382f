"""Daemons remember the newest book that they believed: not those of tests."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    if importlib.util.find_spec("duckdb"):  # each reader has a process, which imports pyarrow
        monkeypatch.setattr("zerotune.tuner.fleet.merging.READERS", 1)
