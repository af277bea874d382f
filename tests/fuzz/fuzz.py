"""`make fuzz MINUTES=10`: coverage-guided fuzzing of every door through which bytes of others come in.

    python tests/fuzz/fuzz.py --minutes 10 [TARGET ...]

The time is shared evenly. What reaches new code is kept in build/fuzz for the next time; inputs that crash, hang or
take too much memory are in build/fuzz/crashes, and the exit code is 1. To see one again: `python
tests/fuzz/one_target.py 0 TARGET FILE`, or for the plugin `build/fuzz/plugin/engine 0 1 /tmp/current FOLDER`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import engines
from fuzz_targets import TARGETS

ROOT: Final = Path("build/fuzz").absolute()
CORPUS: Final = Path(__file__).parent / "corpus"
LEAST_S: Final = 5.0
"""In less nothing is worth to be begun anew."""


def fuzz(name: str, seconds: float, engine: Path | None, crashes: Path) -> engines.Outcome:
    """One target, begun anew after each crash."""
    ends_at_s = time.monotonic() + seconds
    n_runs = n_reached = 0
    found: tuple[Path, ...] = ()
    seed = int(time.time())
    while (left_s := ends_at_s - time.monotonic()) > (LEAST_S if found else 0.0) and len(found) < engines.MOST_CRASHES:
        seed += 1
        folder, seeds = ROOT / name, CORPUS / name
        if name == engines.PLUGIN_TARGET:
            assert engine is not None
            outcome = engines.run_plugin(engine, left_s, seed, folder, seeds, crashes)
        else:
            target = TARGETS[name]
            outcome = engines.run_python(
                name, ends_at_s, seed, folder, seeds, crashes, target.dictionary, target.max_bytes
            )
        n_runs += outcome.n_runs
        n_reached = max(n_reached, outcome.n_reached)
        found += outcome.crashes
        if not outcome.crashes:
            break
    return engines.Outcome(n_runs, n_reached, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    known = [*TARGETS, engines.PLUGIN_TARGET]
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(known)}; none: all")
    told = parser.parse_args()
    if unknown := set(told.targets) - set(known):
        parser.error(f"there is no target {', '.join(sorted(unknown))}: use some of {', '.join(known)}")
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install -e '.[fuzz]'")
    chosen = told.targets or known
    engine = engines.build_plugin_engine(ROOT / engines.PLUGIN_TARGET) if engines.PLUGIN_TARGET in chosen else None
    if engine is None:
        chosen = [name for name in chosen if name != engines.PLUGIN_TARGET]
    seconds = 60 * told.minutes * min(told.jobs, len(chosen)) / max(1, len(chosen))
    crashes = engines.emptied(ROOT / "crashes")
    outcomes: list[engines.Outcome] = []
    telling = threading.Lock()

    def one(name: str) -> None:
        outcome = fuzz(name, seconds, engine, crashes)
        with telling:
            outcomes.append(outcome)
            counts = f"{outcome.n_runs:10,} executions {outcome.n_reached:6,} points {len(outcome.crashes):3} crashes"
            print(f"[{len(outcomes):2}/{len(chosen)}] {name:30} {counts}", flush=True)

    print(f"{len(chosen)} targets, {seconds:.0f} s each, {told.jobs} at a time", flush=True)
    with ThreadPoolExecutor(told.jobs) as workers:
        list(workers.map(one, chosen))
    n_runs, n_crashes = sum(one.n_runs for one in outcomes), sum(len(one.crashes) for one in outcomes)
    if n_crashes:
        print(f"{n_crashes} crashing inputs of {n_runs:,} executions are in {crashes}")
        return 1
    print(f"no crash in {n_runs:,} executions of {len(chosen)} targets")
    return 0


if __name__ == "__main__":
    sys.exit(main())
