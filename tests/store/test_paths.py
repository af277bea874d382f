from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from zerotune.store import paths


def test_the_environment_overrides_every_place(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROTUNE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ZEROTUNE_ENDPOINT", raising=False)
    assert paths.default_endpoint() == f"ipc://{tmp_path}/daemon.sock"
    monkeypatch.setenv("ZEROTUNE_ENDPOINT", "tcp://node:1")
    assert paths.default_endpoint() == "tcp://node:1"
    monkeypatch.setenv("ZEROTUNE_STORE", str(tmp_path / "my.db"))
    assert paths.default_store_path() == tmp_path / "my.db"


@pytest.mark.parametrize("runtime", ["/run/user/77", None])
def test_the_defaults_are_the_users_own_and_found_without_a_word(monkeypatch, runtime):
    for name in ("ZEROTUNE_RUNTIME_DIR", "ZEROTUNE_ENDPOINT", "ZEROTUNE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/me/data")
    if runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    else:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        endpoint = paths.default_endpoint()
    assert "zerotune" in endpoint
    assert endpoint.endswith("/daemon.sock")
    assert runtime is None or endpoint == f"ipc://{runtime}/zerotune/daemon.sock"
    assert paths.default_store_path() == Path("/home/me/data/zerotune/store.db")
