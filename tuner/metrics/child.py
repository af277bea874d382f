"""The metrics of a daemon, served by a child process: no scraper can slow the daemon down."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...store.errors import UserError
from ...store.foreign.own_python import python_with
from ...store.private_folders import make_private
from .server import parse_address

READY: Final = "metrics at "


@contextlib.contextmanager
def metrics_process(address: str, endpoint: str, store_path: Path, curve_dir: Path | None) -> Iterator[str]:
    """Run `zerotune daemon metrics --serve` as a child, which ends with this process in every case; yields its URL.

    Raises:
        UserError: the address is not HOST:PORT, or cannot be bound.
    """
    parse_address(address)
    make_private(store_path.parent)
    command = [*python_with("zerotune.tuner.cli"), "daemon", "metrics", "--serve", address, "--endpoint", endpoint]
    command += ["--store", str(store_path), *(["--curve-keys", str(curve_dir)] if curve_dir is not None else [])]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if not (line := process.stdout.readline()).startswith(READY):
            words = process.stderr.read().strip().splitlines() or [f"metrics cannot be served at {address}"]
            problem, _, remedy = words[-1].removeprefix("zerotune: ").partition("; ")
            raise UserError(problem, remedy or "choose another --metrics HOST:PORT")
        yield line.removeprefix(READY).strip()
    finally:
        process.terminate()
        with process:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
