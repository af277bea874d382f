"""Runs a launcher with `zerotune doctor` as its command, and collects the nodes' answers within limits."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Final

import msgspec

from ...store.errors import UserError, printable, reason
from .node import Fact

TIME_LIMIT_S: Final = 180.0
"""Time for the launcher's start and all checks."""
GRACE_S: Final = 5.0
"""Time for a launcher to end its tasks after SIGTERM."""
MAX_BYTES: Final = 64 * 2**20
"""Longest sum of all answers; one has a few thousand bytes."""
MAX_LINE_BYTES: Final = 8192
MAX_ERROR_BYTES: Final = 1000
"""Most bytes kept of the end of the launcher's stderr, where it names failed nodes."""
MAX_NODES: Final = 100_000
"""Most nodes of an allocation that are counted."""


class Asked(msgspec.Struct, frozen=True):
    """The answers of the nodes."""

    facts: tuple[Fact, ...]
    failure: str
    """The launcher's failure; empty: it succeeded."""
    missing: tuple[str, ...]
    """Nodes of the scheduler's allocation without an answer."""


def ask(launcher: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Asked:
    """Run the launcher, and read the lines of facts in its output; other lines are left out.

    `arguments` are options of `zerotune doctor` on each node. Raises UserError if there is no such launcher.
    """
    if shutil.which(launcher[0]) is None:
        raise UserError(f"{launcher[0]!r} is not there", "give the launcher after `--`, such as `srun -N 4`")
    command = [*launcher, "zerotune", "doctor", "--nodes", "--json", *arguments]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=dict(environment), start_new_session=True
        )
    except OSError as error:
        raise UserError(f"{launcher[0]} cannot be started: {reason(error)}", "correct the launcher") from error
    answers, errors = bytearray(), bytearray()
    readers = [
        threading.Thread(target=_read, args=args, daemon=True)
        for args in ((process.stdout, answers, MAX_BYTES), (process.stderr, errors, -MAX_ERROR_BYTES))
    ]
    for reader in readers:
        reader.start()
    failure = ""
    try:
        status = process.wait(limit_s)
        failure = f"the launcher ended with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        failure = f"the launcher did not end within {limit_s:g} s"
    finally:
        _end(process)
    for reader in readers:
        reader.join(GRACE_S)
    if failure and (message := " ".join(printable(bytes(errors).decode(errors="replace").replace("\n", " ")).split())):
        failure = f"{failure}: {message}"
    facts = tuple(fact for line in bytes(answers).splitlines() if (fact := _fact(line)) is not None)
    answered_nodes = {_short(fact.node) for fact in facts}
    missing = tuple(one for one in _allocated(environment) if _short(one) not in answered_nodes)
    return Asked(facts, failure, missing)


def _read(pipe: IO[bytes], into: bytearray, limit: int) -> None:
    """Read to the end, so that no writer blocks, and keep the first `limit` bytes; if negative, the last ones."""
    with contextlib.suppress(OSError, ValueError):
        while chunk := os.read(pipe.fileno(), 1 << 16):
            into += chunk if limit < 0 else chunk[: limit - len(into)]
            if limit < 0:
                del into[:limit]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and the other processes of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _fact(line: bytes) -> Fact | None:
    """A line's fact, after any label of the launcher."""
    begin = line.find(b'{"answer"')
    if begin < 0 or len(line) > MAX_LINE_BYTES:
        return None
    try:
        fact, texts = msgspec.json.decode(line[begin:], type=Fact), ("answer", "node", "name", "value", "remedy")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return msgspec.structs.replace(fact, **{one: printable(getattr(fact, one)) for one in texts})


def _allocated(environment: Mapping[str, str]) -> list[str]:
    """Nodes of Slurm's allocation, such as `n[01-03,7],login`; none if names have two numbered parts."""
    text, found = environment.get("SLURM_JOB_NODELIST", ""), []
    if re.search(r"\][^,]", text):
        return []
    for stem, ranges in re.findall(r"([^\s,\[\]]+)(\[[^\]]*\])?", text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
            numbers = range(int(first), min(int(last or first), int(first) + MAX_NODES) + 1)
            found += [f"{stem}{str(number).zfill(len(first))}" for number in numbers]
        if not ranges:
            found.append(stem)
    return found[:MAX_NODES]


def _short(node: str) -> str:
    return node.partition(".")[0]
