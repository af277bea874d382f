"""Files of others: how they are read, and what decoding them may take."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from zerotune.store.atomic_file import atomic_write
from zerotune.store.foreign.decoding import Decoding, Undecodable
from zerotune.store.foreign.regular_file import begin_of, read_file

MAX_BYTES = 1000


def greedy(name: str, data: bytes) -> bytes:
    """What `Decoding` runs: does what the name says."""
    if name == "refuse":
        raise ValueError("not ours")
    if name == "much memory":
        return bytes(len(bytearray(2**30)) and 1)
    if name == "no end":
        time.sleep(60.0)
    if name == "death":
        os._exit(1)
    if name == "much":
        return bytes(MAX_BYTES + 1)
    return data[::-1]


@pytest.mark.parametrize("name", ["refuse", "much memory", "no end", "death", "much"])
def test_a_greedy_input_is_refused_and_the_next_is_decoded(name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    with Decoding(f"{__name__}:greedy", memory_mib=128, seconds=1.0, most_bytes=MAX_BYTES) as decode:
        assert decode("", b"abc") == b"cba"
        with pytest.raises(Undecodable):
            decode(name, b"")
        assert decode("", b"abc") == b"cba"


def test_only_a_regular_file_of_some_size_is_read(tmp_path):
    (file := tmp_path / "file").write_bytes(b"x" * MAX_BYTES)
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(file)
    assert read_file(file, MAX_BYTES) == begin_of(link, MAX_BYTES) == b"x" * MAX_BYTES
    for path in (pipe, tmp_path, "/dev/zero", "/dev/tty", tmp_path / "none", tmp_path / "x\0", tmp_path / "\ud800"):
        with pytest.raises(OSError, match=r".+"):
            read_file(path, MAX_BYTES)
        with pytest.raises(OSError, match=r".+"):
            begin_of(path, 1)
    for wrong in ({"max_bytes": MAX_BYTES - 1}, {"owner": os.getuid() + 1}):
        with pytest.raises(OSError, match=r".+"):
            read_file(file, **{"max_bytes": MAX_BYTES, **wrong})
    with pytest.raises(OSError, match=r".+"):
        read_file(link, MAX_BYTES, follow=False)


def test_of_two_writers_each_puts_a_whole_there(tmp_path):
    (path := tmp_path / "out").write_text("old")
    with atomic_write(path) as first:
        first.write_text("A" * 1000)
        with contextlib.ExitStack() as others:
            second, third = (others.enter_context(atomic_write(path)) for _ in range(2))
            second.write_text("B" * 100)
            with pytest.raises(ZeroDivisionError), atomic_write(path):
                raise ZeroDivisionError  # whoever fails takes nothing of others along
            third.write_text("C" * 500)
        assert path.read_text() == "B" * 100
    assert path.read_text() == "A" * 1000
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("name", ["out", "[o]ut*", "\u00fc" * 127])
def test_files_of_killed_writers_go_with_time(tmp_path, name):
    path = tmp_path / name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: os._exit(9))
        for _ in range(2):
            if (child := os.fork()) == 0:
                try:
                    with atomic_write(path) as partial:
                        partial.write_text("half")
                finally:
                    os._exit(1)
            os.waitpid(child, 0)
    old, new = tmp_path.iterdir()
    os.utime(old, (0, 0))
    others = [tmp_path / one for one in ("out.partial", "out.00000000.partial.txt", "out.2.00000000.partial")]
    for one in others[::2]:
        one.touch()
        os.utime(one, (0, 0))
    with atomic_write(path) as partial:
        partial.write_text("new")
    assert {*tmp_path.iterdir()} == {path, new, *others[::2]}


def test_a_link_that_another_user_has_put_there_is_not_written_through(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("gives a link to another user: needs root")
    (theirs := tmp_path / "link").symlink_to(tmp_path / "target")
    os.chown(theirs, 25_001, 25_001, follow_symlinks=False)
    with pytest.raises(PermissionError), atomic_write(theirs):
        raise AssertionError("it was opened")
    assert not (tmp_path / "target").exists()


def test_a_pipe_that_another_user_has_put_there_is_not_waited_for(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("gives a pipe to another user: needs root")
    os.mkfifo(theirs := tmp_path / "pipe")
    os.chown(theirs, 25_001, 25_001)
    (link := tmp_path / "link").symlink_to(theirs)
    for path in (theirs, link):
        with pytest.raises(PermissionError), atomic_write(path):
            raise AssertionError("it would be opened")
    reading, writing = os.pipe()
    os.fchown(writing, 25_001, 25_001)
    with atomic_write(Path(f"/dev/fd/{writing}")) as shells:  # as under sudo
        shells.write_text("text")
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read() == "text"


def test_a_file_that_is_replaced_stays_as_closed_as_it_was(tmp_path):
    (closed := tmp_path / "closed").write_text("old")
    closed.chmod(0o600)
    with atomic_write(closed) as partial:
        partial.write_text("new")
    assert closed.read_text() == "new"
    assert closed.stat().st_mode & 0o777 == 0o600
