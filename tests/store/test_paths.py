from __future__ import annotations

import os
import re
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from zerotune.store import paths
from zerotune.store.errors import UntrustedError, UserError
from zerotune.store.paths import check_endpoint
from zerotune.store.private_folders import make_private, open_socket_folder
from zerotune.tuner.service.endpoint import BoundEndpoint


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one, as homes are: names of sockets end in 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="zt") as folder:
        yield Path(folder)


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
    """Nothing is set but a home; how each node of a cluster finds its runtime directory below it."""
    for name in ("ZEROTUNE_RUNTIME_DIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    make_private(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(paths, "SESSION_DIRS", str(tmp_path / "sessions"))
    monkeypatch.setattr(paths.socket, "gethostname", lambda: "node7.cluster")
    return tmp_path / "home/.local/state/zerotune/run/node7.cluster"


def test_the_runtime_directory_is_that_of_the_session_where_it_is_private(batch_job, monkeypatch, tmp_path):
    of_system, of_session = tmp_path / "sessions" / str(os.getuid()), tmp_path / "session"
    assert paths.runtime_dir() == batch_job
    make_private(of_system)
    assert paths.runtime_dir() == of_system / "zerotune"
    make_private(of_session)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(of_session))
    assert paths.runtime_dir() == of_session / "zerotune"
    of_session.chmod(0o750)
    assert paths.runtime_dir() == of_system / "zerotune"
    of_system.chmod(0o1777)
    assert paths.runtime_dir() == batch_job
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert paths.runtime_dir() == batch_job
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home/state"))
    assert paths.runtime_dir() == tmp_path / "home/state/zerotune/run/node7.cluster"


def test_a_folder_whose_name_is_too_long_for_a_socket_is_passed_over(batch_job, monkeypatch, tmp_path):
    home, session = tmp_path / ("h" * 90), tmp_path / ("s" * 90)
    for folder in (home, session):
        make_private(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert paths.runtime_dir() == batch_job
    monkeypatch.setenv("HOME", str(home))
    check_endpoint(paths.default_endpoint())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_another_users_session_is_not_ours(batch_job, monkeypatch, tmp_path):
    make_private(tmp_path / "session")
    os.chown(tmp_path / "session", 65534, 65534)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    assert paths.runtime_dir() == batch_job


@pytest.fixture(params=["shared", "sticky", "movable", "nobodys", "a file"])
def unfit_home(request, batch_job, monkeypatch, tmp_path):
    home = tmp_path / "home"
    if request.param == "nobodys":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(home, 65534, 65534)
    if request.param == "movable":
        monkeypatch.setenv("HOME", str(home / "mine"))
        make_private(home / "mine")
    if request.param == "a file":
        (home / ".local").write_text("")
    home.chmod({"shared": 0o777, "sticky": 0o1777, "movable": 0o777}.get(request.param, 0o700))


@pytest.mark.usefixtures("unfit_home")
def test_a_folder_that_others_can_write_to_is_no_runtime_directory(tmp_path):
    assert paths.runtime_dir() == tmp_path / "sessions" / str(os.getuid()) / "zerotune"


def test_without_a_safe_folder_the_daemon_refuses_in_one_line(batch_job, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/proc")
    (tmp_path / "sessions").write_text("")  # as for a user who may make nothing there
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, pytest.raises(UserError) as refused:
        BoundEndpoint(socket, paths.default_endpoint(), None)
    assert "ZEROTUNE_RUNTIME_DIR" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["n" * 33, "n" * 64, "../up", "", "knoten-ü", ".hidden"])
def test_any_host_has_a_short_name_of_its_own(batch_job, monkeypatch, name):
    monkeypatch.setattr(paths.socket, "gethostname", lambda: name)
    found = paths.runtime_dir()
    assert found.parent == batch_job.parent
    assert re.fullmatch("[A-Za-z0-9_-]{1,32}", found.name)
    monkeypatch.setattr(paths.socket, "gethostname", lambda: f"{name}2")
    assert paths.runtime_dir() != found


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
        make_private(folder)
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


def test_a_private_folder_has_private_parents(tmp_path):
    umask = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
