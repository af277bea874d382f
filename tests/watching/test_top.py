"""`zerotune status --watch`: what fits on a terminal, what names may not do to it, and how it ends."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import termios
import time

import pytest
from rich.cells import cell_len
from watched_daemon import COMMAND, WAIT_S

from zerotune.store.records import Stage
from zerotune.tuner.cli.options import console
from zerotune.tuner.offline.jobs.listing import Gain, GainKind
from zerotune.tuner.watching.screen import screen
from zerotune.tuner.watching.snapshot import DecisionLine, JobView, KeyLine, Notice, Snapshot, Step

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202eevil\nname"


def job(job_id: str = "job", n_decisions: int = 20) -> JobView:
    return JobView(
        job_id, job_id, "ok", True, Stage.zero3.name, "fabric", 8, 8, 3, 120, 72_000.0, 9_000.0, 0.1, 12.0, 0, 3, 0.4,
        [Notice("passed the tuner by: sends")], 1.0, 2.0, (),
        [Step(n, 72_000.0 + n, 9_000.0, n // 40) for n in range(120)],
        [DecisionLine(9, 3, "promote", "ring/ll", "all_gather", "faster") for _ in range(n_decisions)],
        [KeyLine("all_gather, forward_gather, 1 MB to 2 MB", 28.0, "ring/ll", 5.8, "tree/ll", False)],
        Gain(GainKind.measured, 462.0, 18.4, 17.9, 18.8),
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 10, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 24, 60])
def test_it_fits_on_every_terminal(width, height):
    wide = "你" * 300
    shown = screen(Snapshot("ipc://x", jobs=[job(wide), job("other")]), width, height)
    assert 0 < len(shown) <= height
    assert all(cell_len(line.plain) <= width for line in shown)
    assert all("\n" not in line.plain for line in shown)


def test_names_do_not_steer_the_terminal(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    printing = console()
    for line in screen(Snapshot("ipc://x", jobs=[job(HOSTILE)], notices=[Notice(HOSTILE)]), 200):
        printing.print(line, soft_wrap=True)
    assert "evil" in out.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & set(out.getvalue())


@pytest.mark.parametrize("way", ["q", "ctrl-c"])
def test_it_ends_in_good_order_and_leaves_the_terminal_as_it_was(way, tmp_path):
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 10, 60, 0, 0))
    before = termios.tcgetattr(its)
    command = [*COMMAND, "status", "--watch", "--endpoint", f"ipc://{tmp_path}/none.sock"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:  # fmt: skip
        try:
            shown = b""
            deadline_s = time.monotonic() + WAIT_S
            while b"zerotune status --watch" not in shown:
                shown += os.read(ours, 4096)
                assert time.monotonic() < deadline_s
            assert b"\x1b[?1049h" in shown
            os.write(ours, b"q" if way == "q" else b"\x03")
            while b"\x1b[?1049l" not in shown:
                shown += os.read(ours, 4096)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()  # or a failure would wait for it without end
    assert termios.tcgetattr(its) == before
    os.close(ours)
    os.close(its)
