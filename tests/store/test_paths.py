from __future__ import annotations

import os
import stat
import tempfile
import warnings
from pathlib import Path

import pytest

from zerotune.store import paths
from zerotune.store.errors import UntrustedError
from zerotune.store.private_folders import make_private, open_socket_folder


def test_the_environment_overrides_every_place(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROTUNE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ZEROTUNE_ENDPOINT", raising=False)
    assert paths.default_endpoint() == f"ipc://{tmp_path}/daemon.sock"
    monkeypatch.setenv("ZEROTUNE_ENDPOINT", "tcp://node:1")
    assert paths.default_endpoint() == "tcp://node:1"
    monkeypatch.setenv("ZEROTUNE_STORE", str(tmp_path / "my.db"))
    assert paths.default_store_path() == tmp_path / "my.db"


@pytest.mark.parametrize("has_session", [True, False])
def test_the_defaults_are_the_users_own_and_found_without_a_word(monkeypatch, tmp_path, has_session):
    runtime = tmp_path / "run" if has_session else None
    for name in ("ZEROTUNE_RUNTIME_DIR", "ZEROTUNE_ENDPOINT", "ZEROTUNE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/me/data")
    if runtime:
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    else:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        endpoint = paths.default_endpoint()
    assert "zerotune" in endpoint
    assert endpoint.endswith("/daemon.sock")
    assert runtime is None or endpoint == f"ipc://{runtime}/zerotune/daemon.sock"
    assert paths.default_store_path() == Path("/home/me/data/zerotune/store.db")


@pytest.fixture
def batch_job(monkeypatch, tmp_path):
    """Nothing is set, and the temporary folder is one that the test may write to."""
    for name in ("ZEROTUNE_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(paths, "SESSION_DIRS", str(tmp_path / "sessions"))


@pytest.mark.usefixtures("batch_job")
def test_the_runtime_directory_is_that_of_the_session_where_it_is_private(monkeypatch, tmp_path):
    of_system, of_session = tmp_path / "sessions" / str(os.getuid()), tmp_path / "session"
    in_temporary = tmp_path / f"zerotune-{os.getuid()}"
    assert paths.runtime_dir() == in_temporary
    make_private(of_system)
    assert paths.runtime_dir() == of_system / "zerotune"
    make_private(of_session)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(of_session))
    assert paths.runtime_dir() == of_session / "zerotune"
    of_session.chmod(0o750)
    assert paths.runtime_dir() == of_system / "zerotune"
    of_system.chmod(0o1777)
    assert paths.runtime_dir() == in_temporary
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert paths.runtime_dir() == in_temporary


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder away")
@pytest.mark.usefixtures("batch_job")
def test_another_users_session_is_not_ours(monkeypatch, tmp_path):
    make_private(tmp_path / "session")
    os.chown(tmp_path / "session", 65534, 65534)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    assert paths.runtime_dir() == tmp_path / f"zerotune-{os.getuid()}"


def may_have_a_socket(folder: Path) -> bool:
    try:
        os.close(open_socket_folder(folder))
    except UntrustedError:
        return False
    return True


@pytest.mark.usefixtures("batch_job")
def test_only_what_others_cannot_write_to_may_have_a_socket(tmp_path):
    own, named = paths.runtime_dir(), tmp_path / "named"
    for folder in (own, named):
        folder.mkdir()
    modes = (0o700, 0o750, 0o755, 0o770, 0o777, 0o1777)
    allowed = {}
    for folder in (own, named):
        for mode in modes:
            folder.chmod(mode)
            allowed[folder, mode] = may_have_a_socket(folder)
    assert [mode for mode in modes if allowed[own, mode]] == [0o700]
    assert [mode for mode in modes if allowed[named, mode]] == [0o700, 0o750, 0o755]
    named.chmod(0o700)
    own.rmdir()
    own.symlink_to(named)
    assert not may_have_a_socket(own)


def test_what_is_made_private_is_private_all_the_way(tmp_path):
    umask = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
