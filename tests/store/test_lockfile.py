from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from zerotune.store.errors import UntrustedError
from zerotune.store.lockfile import LockFile, LockHeld, named_holder


def test_the_loser_learns_who_won(tmp_path):
    lock = LockFile(tmp_path / "lock")
    with pytest.raises(LockHeld) as held:
        LockFile(tmp_path / "lock")
    assert held.value.pid == os.getpid()
    assert held.value.command
    lock.release()
    lock.release()
    assert not (tmp_path / "lock").exists()
    LockFile(tmp_path / "lock").release()


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[]", b'{"pid": "x"}', b'{"pid": 1, "command": "gone"}'])
def test_a_file_without_a_lock_is_taken_over_whatever_it_says(tmp_path, text):
    (tmp_path / "lock").write_bytes(text)
    lock = LockFile(tmp_path / "lock")
    assert str(os.getpid()).encode() in (tmp_path / "lock").read_bytes()
    lock.release()


@pytest.mark.parametrize("text", [b"", b"[]", b'{"pid": "x"}'])
def test_a_holder_that_cannot_be_read_is_still_a_holder(tmp_path, text):
    lock = LockFile(tmp_path / "lock")
    (tmp_path / "lock").write_bytes(text)
    with pytest.raises(LockHeld, match="another process"):
        LockFile(tmp_path / "lock")
    lock.release()


def test_a_lock_that_cannot_name_its_holder_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            LockFile(tmp_path / "lock")
    assert not list(tmp_path.iterdir())
    LockFile(tmp_path / "lock").release()


@pytest.mark.parametrize("put", [Path.symlink_to, Path.hardlink_to])
def test_a_links_target_is_not_overwritten(tmp_path, put):
    secret = tmp_path / "secret"
    secret.write_text('{"pid": 1, "command": "secret"}')
    put(tmp_path / "lock", secret)
    with pytest.raises(UntrustedError, match=str(tmp_path / "lock")):
        LockFile(tmp_path / "lock")
    assert secret.read_text() == '{"pid": 1, "command": "secret"}'


def test_a_link_to_nowhere_makes_no_file(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "new")
    with pytest.raises(UntrustedError):
        LockFile(tmp_path / "lock")
    assert not (tmp_path / "new").exists()
    assert named_holder(tmp_path / "lock") is None


def test_a_pipe_makes_nobody_wait(tmp_path):
    os.mkfifo(tmp_path / "lock")
    assert named_holder(tmp_path / "lock") is None
    with pytest.raises(UntrustedError):
        LockFile(tmp_path / "lock")


@pytest.mark.parametrize("pid", ["1" + "0" * 30, "-1", "Infinity", "1e400", "[" * 2000])
def test_a_number_that_no_process_has_names_nobody(tmp_path, pid):
    (tmp_path / "lock").write_text(f'{{"command": "daemon", "pid": {pid}}}')
    assert named_holder(tmp_path / "lock") is None
