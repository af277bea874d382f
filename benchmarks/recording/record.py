"""Run benchmarks and keep their figures, with date, commit, machine and command, below benchmarks/results.

python -m benchmarks record              all but the timed ones
python -m benchmarks record --timed      the timed ones: let nothing else run meanwhile
python -m benchmarks record NAME ...     these

Commit first. A run is left out if this very code was recorded (`--again` runs it). docs/results.md is renewed after
each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Final

from benchmarks.lib.reporting import Result
from benchmarks.recording import results
from benchmarks.recording.runs import ROOT, RUNS, Recorded, Run

CODE: Final = ("agent", "store", "tuner", "zero_runtime", "zerotune", "benchmarks", ":!benchmarks/results")
"""Figures may depend on these: a run is recorded anew when any of it has changed."""
QUIET_LOAD: Final = 0.5
"""More processes (1-minute load average) besides a timed run are reported: they take part of a core from it."""


def main() -> None:
    known = {run.name: run for run in RUNS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--timed", action="store_true", help="the timed ones, where no NAME is given")
    parser.add_argument("--again", action="store_true", help="also what is recorded for this code")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in known:
            parser.error(f"no run is called {name!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in arguments.names] or [run for run in RUNS if run.is_timed == arguments.timed]
    if any(run.is_timed for run in chosen) and os.getloadavg()[0] > QUIET_LOAD:
        print(f"load is {os.getloadavg()[0]:.1f}: other processes run here, and times will be longer", flush=True)
    failed = []
    for number, run in enumerate(chosen, start=1):
        place = f"{number} of {len(chosen)}: {run.name}"
        if not arguments.again and is_current(run):
            print(f"{place}: is there", flush=True)
            continue
        print(f"{place}: python -m benchmarks {run.command}", flush=True)
        try:
            recorded = record(run)
        except RuntimeError as error:
            failed.append(run.name)
            print(f"{place}: failed: {error}", flush=True)
            continue
        results.main()
        n_missed = sum(one.is_met is False for one in recorded.results)
        missed = f", {n_missed} miss their target" if n_missed else ""
        print(f"{place}: {len(recorded.results)} figures in {recorded.wall_s:.0f} s{missed}", flush=True)
    if failed:
        raise SystemExit(f"not recorded: {', '.join(failed)}")


ENDING_S: Final = 20.0
"""The time that a benchmark's processes have to end in good order."""


def record(run: Run) -> Recorded:
    """Run a benchmark and write its figures to its file.

    Raises:
        RuntimeError: it printed no figures, or did not end in time.
    """
    commit, load, began_s = commit_now(), os.getloadavg()[0], time.monotonic()
    command = [sys.executable, "-m", "benchmarks", *run.words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=run.timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it did not end in {run.timeout_s:.0f} s") from None
    finally:  # its processes, too, also when this one is interrupted; ranks of a killed torchrun would live on
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(ENDING_S)
    try:
        document = json.loads(printed.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"exit code {process.returncode}, and no line of JSON at the end of its output") from None
    recorded = Recorded(
        results=tuple(Result(**one) for one in document["results"]),
        environment=document["environment"] | {"load": round(load, 2)},  # of other processes
        command=f"python -m benchmarks {run.command}",
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        commit=commit,
        wall_s=round(time.monotonic() - began_s, 1),
    )
    recorded.save(run.path)
    return recorded


def is_current(run: Run) -> bool:
    """It is recorded with this command, and no code has changed since."""
    if not run.path.exists():
        return False
    recorded = Recorded.load(run.path)
    if recorded.commit.endswith("+") or recorded.command != f"python -m benchmarks {run.command}":
        return False
    same = subprocess.run(
        ["git", "diff", "--quiet", recorded.commit, "--", *CODE], cwd=ROOT, capture_output=True, check=False
    )
    return same.returncode == 0


def commit_now() -> str:
    """The commit of the code; with a `+` if files of it were changed since."""
    return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", *CODE) else "")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
