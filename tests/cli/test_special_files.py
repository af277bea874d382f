"""A pipe or a device in the place of a file is one sentence at once: no command waits for it, or reads without end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMANDS = {
    "launch --plan": ["launch", "--plan", "FILE", "--", "true"],
    "launch --fabric": ["launch", "--fabric", "FILE", "--", "true"],
    "nccl": ["nccl", "FILE", "--plan", "FILE"],
    "replay": ["replay", "FILE"],
    "replay --plan": ["replay", "none.db", "--plan", "FILE"],
    "fabrics add": ["fabrics", "add", "x", "FILE"],
    "advise": ["advise", "FILE"],
    "advise --measured": ["advise", "7e9", "--measured", "FILE"],
    "book show": ["book", "show", "FILE"],
    "book show --book-key": ["book", "show", "none.book", "--book-key", "FILE"],
    "book build --sign": ["book", "build", ".", "--out", "new.book", "--sign", "FILE"],
    "daemon --book-key": ["daemon", "--book", "none.book", "--book-key", "FILE", "--store", "s.db"],
    "jobs": ["jobs", "--store", "FILE"],
    "store check": ["store", "check", "FILE"],
    "import": ["import", "FILE", "--store", "s.db"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["pipe", "endless"])
def test_what_is_no_file_is_refused_at_once(command, name, tmp_path):
    file = tmp_path / f"{name}.toml"
    os.mkfifo(file) if name == "pipe" else file.symlink_to("/dev/zero")
    words = [word.replace("FILE", str(file)) for word in COMMANDS[command]]
    limited = ["prlimit", f"--as={6 << 30}", sys.executable, "-m", "zerotune.tuner.cli", *words]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


LITTLE_MEMORY = """
import contextlib, resource
from pathlib import Path
from zerotune.tuner import cli

with contextlib.suppress(SystemExit):
    cli.main()  # what it imports is there from then on
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (8 << 20), resource.RLIM_INFINITY))
cli.main()
"""


def test_a_file_that_memory_has_no_room_for_is_one_sentence(tmp_path):
    (tmp_path / "plan.json").write_bytes(b" " * (16 << 20))
    command = [sys.executable, "-c", LITTLE_MEMORY, "launch", "--plan", "plan.json", "--", "true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2), done.stderr
    assert "ulimit -v" in done.stderr
