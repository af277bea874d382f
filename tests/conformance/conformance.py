"""What torch's own tests say of the emulated backend, and the page that keeps it.

`python -m tests.conformance.conformance` runs them, some five minutes on two cores, and renews the page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "compatibility.md"
BEGIN, END = "<!-- made by tests/conformance/conformance.py -->", "<!-- end -->"


class Way(NamedTuple):
    """How tests are run."""

    asked: str
    """The backend's name, by which torch's tests decide what they try. Under that of NCCL every test wants GPUs."""
    n_ranks: int = 4
    """Some tests make groups of three, or pairs."""
    skipped_for: str = ""
    """What tests that are tried this way were skipped for so far."""

    def __str__(self) -> str:
        return f"asked for as {self.asked}" + (f", {self.n_ranks} ranks" if self.n_ranks != WAYS[0].n_ranks else "")


WAYS: Final = (Way("emulated_nccl"), Way("gloo"), Way("mpi"), Way("gloo", 8, "small world size"))
"""A later one is for tests that are skipped under the earlier."""
KNOWN: Final = {
    "test_monitored_barrier_gloo": "torch has monitored barriers for gloo alone, not for NCCL",
    "test_monitored_barrier_gloo_subgroup": "torch has monitored barriers for gloo alone, not for NCCL",
    "test_monitored_barrier_failure_order": "torch has monitored barriers for gloo alone, not for NCCL",
    "test_monitored_barrier_wait_all_ranks": "torch has monitored barriers for gloo alone, not for NCCL",
    "test_sparse_all_reduce_sum": "NCCL has no sparse collectives",
}
"""Why tests fail as they do with NCCL."""
WHY: Final = (
    (r"https://github\.com/pytorch|Test is failing|flaky|flakiness|racy", "switched off by torch"),
    (r"CUDA|GPU|NCCL|Nccl|'nccl'\}", "needs tensors on GPUs"),
    (r"torchvision", "needs torchvision"),
)
"""Torch's reasons for skipping, by what they come to; the first that fits."""


@dataclass(frozen=True)
class Verdict:
    """How a test ended, under the last name that it was tried by."""

    outcome: str
    why: str


def run(folder: Path) -> dict[str, Verdict]:
    """Run torch's tests.

    Args:
        folder: is given the logs.

    Returns:
        Verdicts by the test's name.

    Raises:
        RuntimeError: a run ended early.
    """
    names: list[str] = []  # all
    verdicts: dict[str, Verdict] = {}
    skipped: dict[str, str] = {}
    """Torch's reasons by test, one below the other."""
    for way in WAYS:
        if way != WAYS[0]:
            names = [name for name, why in skipped.items() if way.skipped_for in why]
            if not names:
                continue
        for name, (outcome, why) in _outcomes(way, names, folder).items():
            if outcome == "skipped":
                skipped[name] = f"{skipped.get(name, '')}{why}\n"
                verdicts[name] = Verdict(outcome, _reason(skipped[name]))
                continue
            skipped.pop(name, None)
            passed = "" if way == WAYS[0] else str(way)
            verdicts[name] = Verdict(outcome, passed if outcome == "passed" else KNOWN.get(name, why))
    return verdicts


def _outcomes(way: Way, names: Sequence[str], folder: Path) -> dict[str, tuple[str, str]]:
    environment = {
        **os.environ, "ZEROTUNE_COMPUTE": "none", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BACKEND": way.asked, "WORLD_SIZE": str(way.n_ranks),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "90",
    }  # fmt: skip
    out, log = (folder / f"{way.asked}-{way.n_ranks}.{kind}" for kind in ("json", "log"))
    command = [sys.executable, str(Path(__file__).with_name("c10d_suite.py")), str(out), *names]
    with log.open("w") as stream:
        ended = subprocess.run(command, env=environment, cwd=folder, stdout=stream, stderr=stream, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"exit code {ended.returncode}, see {log}")
    outcomes: dict[str, tuple[str, str]] = json.loads(out.read_text())
    return outcomes


def _reason(why: str) -> str:
    return next((reason for pattern, reason in WHY if re.search(pattern, why)), "; ".join(why.splitlines()))


def table(verdicts: Mapping[str, Verdict]) -> str:
    """The page's table: tests that ended alike and for one reason share a row."""
    rows = defaultdict(list)
    for name, verdict in sorted(verdicts.items()):
        rows[verdict.outcome, verdict.why].append(name)
    counts = ", ".join(f"{sum(each.outcome == o for each in verdicts.values())} {o}" for o in OUTCOMES)
    lines = [
        f"torch {torch.__version__.partition('+')[0]}: {counts}.", "",
        "| outcome | why | n | tests |", "|---|---|---|---|",
    ]  # fmt: skip
    for (outcome, why), names in sorted(rows.items()):
        tests = ", ".join(f"`{name.removeprefix('test_')}`" for name in names)
        lines.append(f"| {outcome} | {why} | {len(names)} | {tests} |")
    return "\n".join(lines)


OUTCOMES: Final = ("passed", "skipped", "failed")


def kept() -> tuple[str, dict[str, str]]:
    """The page's torch release, and its outcomes by test."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    release = re.search(r"^torch (\d[\d.]*\d)", text.strip())
    outcomes = {f"test_{name}": row[0] for row in _rows(text) for name in re.findall(r"`(\w+)`", row[-1])}
    return release[1] if release else "", outcomes


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in OUTCOMES:
            yield cells


def main() -> None:
    """Renew the page."""
    with tempfile.TemporaryDirectory() as folder:
        renew(run(Path(folder)))


def renew(verdicts: Mapping[str, Verdict]) -> None:
    """Write the page's table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(verdicts)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
