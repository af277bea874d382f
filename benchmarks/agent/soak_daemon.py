"""Many collectives under agent and daemon, and 48 hours of the daemon's clock: does anything grow?

Run: python -m benchmarks soak_daemon [--collectives N] [--ranks N] [--hours H] [--quick] [--json]

The daemon's clocks jump ahead by an hour 48 times, so that timers, checkpoints and retention run. At each jump the
daemon drops the job as silent and takes it up again. `..._growth` is the slope of memory or open files after the
first 40 % of the run. The ends are those of its 95 % confidence interval.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.lib.argument_types import natural, positive, whole
from benchmarks.lib.faults.shifted_clock import ShiftedClock
from benchmarks.lib.free_port import free_port
from benchmarks.lib.growth import Growth
from benchmarks.lib.reporting import Result, options_of, report, say
from zerotune.tuner.client.status import fetch_status

ZEROTUNE: Final = (sys.executable, "-m", "zerotune.tuner.cli")
LOOK_EVERY_S: Final = 0.5
HOUR_S: Final = 3600.0
KEPT_ROWS: Final = 100_000
"""Rows that the store keeps: it is full before growth is judged, since a daemon grows with its rows."""


def soak(n_collectives: int, n_ranks: int, hours: int, folder: Path) -> list[Result]:
    """Raises SystemExit if a rank failed or the daemon ended."""
    clock = ShiftedClock(folder)
    endpoint = f"ipc://{folder}/d.sock"
    environment = {**os.environ, "ZEROTUNE_ENDPOINT": endpoint, "ZEROTUNE_RUNTIME_DIR": str(folder)}
    environment |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(n_ranks)}
    with contextlib.ExitStack() as stack:

        def start(*command: str, **more: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, env=environment | more, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        kept = ("--store", f"{folder}/store.db", "--retention-rows", str(KEPT_ROWS))
        daemon = start(*ZEROTUNE, "daemon", "--endpoint", endpoint, *kept, **clock.environment)
        while fetch_status(endpoint, timeout_s=1.0) is None:
            if daemon.poll() is not None:
                raise SystemExit(f"the daemon ended with code {daemon.returncode}")
        work = (sys.executable, "-m", "benchmarks.agent.soak_worker", str(n_collectives), str(folder))
        ranks = [
            start(
                *ZEROTUNE, "launch", "--fabric", "ethernet_boxes", "--", *work,
                RANK=str(rank), LOCAL_RANK=str(rank),
            )
            for rank in range(n_ranks)
        ]  # fmt: skip
        growth, pids = Growth(), {"daemon": daemon.pid, **{f"rank{n}": one.pid for n, one in enumerate(ranks)}}
        began_s = told_s = time.monotonic()
        n_jobs_seen: set[int] = set()
        while any(rank.poll() is None for rank in ranks):
            time.sleep(LOOK_EVERY_S)
            n_done = progress(folder)
            if n_done == 0:
                began_s = time.monotonic()
                continue
            growth.look(n_done, pids)
            n_hours = hours * n_done // n_collectives
            clock.shift(wall_s=HOUR_S * n_hours, monotonic_s=HOUR_S * n_hours)
            n_jobs_seen.add(n_hours)
            if any(rank.poll() for rank in ranks) or daemon.poll() is not None:
                raise SystemExit(f"a rank or the daemon ended: {daemon.poll()}, {[rank.poll() for rank in ranks]}")
            if time.monotonic() - told_s > 30.0:
                told_s = time.monotonic()
                say(f"{n_done:,} collectives, hour {n_hours}, {n_done / (told_s - began_s):.0f} per s")
        seconds = time.monotonic() - began_s
        status = fetch_status(endpoint, timeout_s=5.0)
        ends = [json.loads((folder / f"end{rank}").read_text()) for rank in range(n_ranks)]
        return [
            Result("n_collectives_per_rank", n_collectives, "calls", "> 0"),
            Result("collectives_per_s", n_collectives / seconds, "1/s"),
            Result("hours_of_the_daemons_clock", max(n_jobs_seen), "h"),
            Result("n_disagreements", sum(end["n_disagreements"] for end in ends), "calls", "0"),
            Result("the_daemon_answers", float(status is not None), "", "1"),
            Result("store_mib", (folder / "store.db").stat().st_size / 2**20, "MiB"),
            *growth.results(1e6, "million calls"),
        ]


def progress(folder: Path) -> int:
    try:
        (n_done,) = struct.unpack("q", (folder / "progress0").read_bytes())
    except (OSError, struct.error):
        return 0
    return int(n_done)


def main() -> None:
    parser = options_of(__doc__, quick="100,000 collectives")
    parser.add_argument("--collectives", type=positive, default=10_000_000)
    parser.add_argument("--ranks", type=whole(2), default=2)
    parser.add_argument("--hours", type=natural, default=48, help="by which the daemon's clock jumps ahead, one by one")
    arguments = parser.parse_args()
    n_collectives = 100_000 if arguments.quick else arguments.collectives
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        results = soak(n_collectives, arguments.ranks, arguments.hours, Path(folder))
    report("soak_daemon", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
