from __future__ import annotations

import errno
import os

import pytest

from zerotune.store.lockfile import LockFile, LockHeld


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
