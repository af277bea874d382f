"""A pipe or a device in the place of a file is one sentence at once: no command waits for it, or reads without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMMANDS = (
    ["launch", "--plan", "FILE", "--", "true"],
    ["launch", "--fabric", "FILE", "--", "true"],
    ["predict", "FILE", "--plan", "FILE"],
    ["replay", "FILE"],
    ["replay", "none.db", "--plan", "FILE"],
    ["hardware", "add", "x", "FILE"],
    ["advise", "FILE"],
    ["advise", "7e9", "--measured", "FILE"],
    ["store", "book", "show", "FILE"],
    ["store", "book", "show", "none.book", "--book-key", "FILE"],
    ["store", "book", "build", ".", "--out", "new.book", "--sign", "FILE"],
    ["daemon", "--book", "none.book", "--book-key", "FILE", "--store", "s.db"],
    ["jobs", "--store", "FILE"],
    ["store", "check", "FILE"],
    ["store", "import", "FILE", "--store", "s.db"],
)


IN_TURN = """
import json, sys
from zerotune.tuner import cli

for words in json.loads(sys.argv[1]):
    sys.argv = ["zerotune", *words]
    try:
        cli.main()
    except SystemExit as ended:
        print(ended.code, *words, file=sys.stderr)
"""


@pytest.mark.parametrize("name", ["pipe", "endless"])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused_at_once(name, tmp_path):
    file = tmp_path / f"{name}.toml"
    os.mkfifo(file) if name == "pipe" else file.symlink_to("/dev/zero")
    all_words = [[word.replace("FILE", str(file)) for word in words] for words in COMMANDS]
    limited = ["prlimit", f"--as={6 << 30}", sys.executable, "-c", IN_TURN, json.dumps(all_words)]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("zerotune: ")] == [
        " ".join(["2", *words]) for words in all_words
    ]


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
