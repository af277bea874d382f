"""The store under failing system calls and power cuts: every acknowledged row is there, and no invented row.

Run: python -m benchmarks store_faults [--quick] [--json]

In each scenario (store_faults_worker.py) one call fails, or the power goes after one change, and the next daemon opens
the store. `disagreements`: wrong or doubled rows, parts of batches, unsound stores. `rows_given_up`: reported as lost.
`unexpected_errors`: errors without a clear refusal, or refusals that outlast the fault.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from benchmarks.lib.reporting import Result, options_of, report, say
from benchmarks.service.power_cut import Left, read_log

SHIM: Final = Path(__file__).with_suffix(".c")
SCENARIOS: Final = ("write", "resume", "migrate", "backup", "salvage", "repair", "running")
FAIL, SHORT, SHORT_THEN_FAIL = range(3)
FAULTS: Final = (
    *((kind, errno.EIO, FAIL) for kind in ("write", "sync", "rename", "truncate", "unlink", "open", "read")),
    ("write", errno.ENOSPC, FAIL),
    ("write", errno.EIO, SHORT),
    ("write", errno.ENOSPC, SHORT_THEN_FAIL),
    ("open", errno.ENOSPC, FAIL),
    ("malloc", errno.ENOMEM, FAIL),
)
QUICK_S: Final = 40.0
MALLOCS: Final = 64
"""One in so many is taken."""
CUTS_AT_ONCE: Final = 8
TOLD_EVERY_S: Final = 20.0
MEMORY: Final = Path("/dev/shm")
"""fsync costs nothing there; the shim decides which calls fail."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """In memory if there is such a folder."""
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="store_faults-", dir=where) as name:
        yield Path(name)


def build(folder: Path) -> Path:
    built = folder / SHIM.with_suffix(".so").name
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", built, SHIM, "-ldl", "-pthread"], check=True)
    return built


class Worker:
    def __init__(self, shim: Path, scratch: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.service.store_faults_worker", str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))


@dataclass
class Tally:
    events: Counter[str] = field(default_factory=Counter)
    """By kind."""
    sums: Counter[str] = field(default_factory=Counter)
    stall_ms: float = 0.0
    said: list[str] = field(default_factory=list)
    """Failures, a line each."""

    def add(self, kind: str, what: str, answer: dict[str, Any]) -> None:
        """Count one run; `kind` is that of the call, or `power cut`; `what` describes the run for people."""
        if "fired" in answer and not answer["fired"]:
            return  # the run took another way, and the call was never made
        self.events[kind] += 1
        self.stall_ms = max(self.stall_ms, answer.get("stall_ms", 0.0))
        bad = {name: answer.get(name, 0) for name in ("hangs", "lost", "wrong", "given_up") if answer.get(name)}
        self.sums.update(bad)
        self.sums["errors"] += len(answer.get("errors", ()))
        if bad or answer.get("errors"):
            self.said.append(f"{what}: {bad or ''} {'; '.join(answer.get('errors', ()))}")


def jobs_of(worker: Worker, scratch: Path) -> list[dict[str, Any]]:
    """Every fault and every power cut there is, after one run of each scenario without any."""
    found: list[dict[str, Any]] = []
    for scenario in SCENARIOS:
        folder, log = scratch / f"begun-{scenario}", scratch / f"{scenario}.log"
        words = {"do": "run", "scenario": scenario, "folder": str(folder)}
        begun = worker.ask(**words, rows=[], log=str(log))
        if begun.get("errors") or begun.get("wrong"):
            raise SystemExit(f"{scenario} fails without a fault: {begun}")
        rows = begun["rows"]
        for kind, code, how in FAULTS:
            found += (
                {"do": "run", "scenario": scenario, "kind": kind, "at": at + 1, "errno": code, "how": how, "rows": rows}
                for at in range(0, begun["counts"].get(kind, 0), MALLOCS if kind == "malloc" else 1)
            )
        n_changes = len(read_log(log))
        where = {"log": str(log), "folder": str(folder), "inodes": begun["inodes"], "rows": rows}
        found += ({"do": "cut", "scenario": scenario, "at": [at + 1], **where} for at in range(n_changes))
    return found


def name_of(job: dict[str, Any]) -> str:
    how = ("", ", half written", ", half written and then nothing")[job["how"]]
    return f"{job['scenario']}: {job['kind']} {job['at']}, {errno.errorcode[job['errno']]}{how}"


def gathered(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Power cuts of one scenario a few at a time, since each job reads the log from its beginning."""
    by_scenario: dict[str, list[int]] = {}
    cuts = {job["scenario"]: job for job in jobs if job["do"] == "cut"}
    for job in jobs:
        if job["do"] == "cut":
            by_scenario.setdefault(job["scenario"], []).extend(job["at"])
    found = [job for job in jobs if job["do"] != "cut"]
    for scenario, places in by_scenario.items():
        starts = range(0, len(places), CUTS_AT_ONCE)
        found += ({**cuts[scenario], "at": places[at : at + CUTS_AT_ONCE]} for at in starts)
    return found


def in_turns(jobs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One of each kind of call after the other, power cuts among them: each has its share whenever it ends."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        by_kind.setdefault(job.get("kind", "power cut"), []).append(job)
    for some in zip_longest(*by_kind.values()):
        yield from (job for job in some if job is not None)


def wait_for(threads: Sequence[threading.Thread], most_s: float | None, tell: Callable[[], None]) -> None:
    """Wait for all threads, at most `most_s` (None: until they end), and call `tell` now and then for progress."""
    ends_s = float("inf") if most_s is None else time.monotonic() + most_s
    told_s = time.monotonic()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < ends_s:
        time.sleep(0.1)
        if time.monotonic() - told_s > TOLD_EVERY_S:
            told_s = time.monotonic()
            tell()


def measure(most_s: float | None, n_workers: int) -> tuple[Tally, int]:
    """Run the faults for `most_s` (None: all of them); returns their results, and how many faults there are."""
    tally, lock = Tally(), threading.Lock()
    with scratch_folder() as scratch, ExitStack() as running:
        shim = build(scratch)
        workers = [running.enter_context(Worker(shim, scratch)) for _ in range(n_workers)]
        workers[0].ask(do="templates")
        everything = jobs_of(workers[0], scratch)
        random.Random(1).shuffle(everything)
        waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        for job in in_turns(gathered(everything)):
            waiting.put(job)
        n_jobs, has_ended = waiting.qsize(), threading.Event()

        def serve(worker: Worker) -> None:
            while not has_ended.is_set():
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                answer = worker.ask(**job)
                with lock:
                    n_said = len(tally.said)
                    if job["do"] == "run":
                        tally.add(job["kind"], name_of(job) + " of " + answer.get("place", "?"), answer)
                    for one in answer.get("found", ()):
                        tally.add("power cut", one["what"], one)
                    for line in tally.said[n_said:]:
                        print(line, file=sys.stderr, flush=True)

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        with suppress(KeyboardInterrupt):  # the findings so far are reported
            wait_for(threads, most_s, lambda: say(f"{n_jobs - waiting.qsize():,} of {n_jobs:,} runs"))
        has_ended.set()
        for thread in threads:
            thread.join()
        return tally, sum(len(Left) if job["do"] == "cut" else 1 for job in everything)


def main() -> None:
    parser = options_of(__doc__, quick="a sample of each kind; ends within 60 s")
    arguments = parser.parse_args()
    tally, n_all = measure(QUICK_S if arguments.quick else None, max(1, os.cpu_count() or 1))
    results = [
        Result("events", sum(tally.events.values()), "", "> 0"),
        *(Result(f"events:{kind.replace(' ', '_')}", n, "") for kind, n in sorted(tally.events.items())),
        Result("events_there_are", n_all, ""),
        Result("hangs", tally.sums["hangs"], "", "0"),
        Result("disagreements", tally.sums["wrong"], "", "0"),
        Result("acknowledged_rows_lost", tally.sums["lost"], "", "0"),
        Result("rows_given_up", tally.sums["given_up"], "", "0"),
        Result("unexpected_errors", tally.sums["errors"], "", "0"),
        Result("worst_stall_ms", tally.stall_ms, "ms", "<= 1000"),
    ]
    report("store_faults", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
