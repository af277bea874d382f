"""Unmodified GPU scripts, torch's CUDA build and ProcessGroupNCCL under a daemon, on GPUs that are not there.

make rehearse                                       every case with every release; hours the first time
python -m benchmarks rehearse --releases 2.9.1 --only fsdp2,daemon-killed

NCCL's decisions and launches are real; no value and no time is a GPU's. Cases that went well are not repeated (--afresh
does). Exit codes: 0 nothing failed, 1 something did.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.lib.free_port import free_port
from benchmarks.lib.last_words import last_words
from benchmarks.rehearse.cases import CASES, FRAMEWORK_SCRIPTS, Case
from benchmarks.rehearse.environments import RELEASES, REPOSITORY, python_of, tells_times
from benchmarks.rehearse.outcomes import OUTCOMES, Outcome, Outcomes
from benchmarks.rehearse.promotion import time_over_best

MOST_BYTES = 6 << 30
"""Of a process's own memory: a rank of torch takes three; and a third of the smallest suitable machine's."""
HANGS = "the mock CUDA hangs"
"""The mock's message if ranks launched different things."""


class NotAsItMust(Exception):
    """A case went wrong; the message has the reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", type=lambda text: text.split(","), default=list(RELEASES), help="of torch")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"of {', '.join(names)}")
    parser.add_argument("--afresh", action="store_true", help="forget what an earlier run has done")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(names):
        parser.error(f"unknown case {sorted(unknown)[0]!r}: use some of {', '.join(names)}")
    outcomes = Outcomes(OUTCOMES, afresh=options.afresh)
    for release in options.releases:
        python = python_of(release)
        for case in CASES:
            if (options.only and case.name not in options.only) or outcomes.is_done(release, case.name):
                continue
            outcome = carry_out(python, release, case)
            outcomes.add(outcome)
            print(
                f"{release} {case.name}: {outcome.outcome} in {outcome.seconds:.0f} s {outcome.reason}", file=sys.stderr
            )
    print(outcomes.table(names))
    return 0 if outcomes.all_well() else 1


def carry_out(python: Path, release: str, case: Case) -> Outcome:
    """One case; an exception becomes its outcome."""
    if (case.finds or case.withdraws or case.module) and not tells_times(python):
        return Outcome(release, case.name, "skipped", "this NCCL's profiler tells no times")
    if case.n_nodes > 1 and not tells_times(python):
        return Outcome(release, case.name, "skipped", "NCCL 2.21 has no several nodes on the mock")
    if case.needs and subprocess.run([python, "-c", f"import {case.needs}"], capture_output=True).returncode != 0:
        return Outcome(release, case.name, "skipped", f"{case.needs} is not installed, or does not load")
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="zt"))  # sockets have short names
    try:
        n_measured = Job(python, case, folder).run()
    except NotAsItMust as wrong:
        return Outcome(release, case.name, "failed", str(wrong), time.monotonic() - began_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(release, case.name, "ok", "", time.monotonic() - began_s, n_measured)


class Job:
    """Daemons and a job of few ranks, on one node or two, in a folder."""

    def __init__(self, python: Path, case: Case, folder: Path) -> None:
        self.python, self.case, self.folder = python, case, folder
        self.store, self.log = folder / "0.db", folder / "0.log"
        """Of the first node."""

    def run(self) -> int:
        """Returns the number of measured collectives. Raises NotAsItMust if the job went wrong."""
        nodes = range(self.case.n_nodes)
        daemons: list[subprocess.Popen[bytes]] = []
        jobs: list[subprocess.Popen[bytes]] = []
        try:
            if not self.case.module:
                daemons += [self._start_daemon(node) for node in nodes]
                for node in nodes:
                    self._until((self.folder / f"{node}.sock").exists, "a daemon did not start", 60)
            port = free_port()
            jobs += [self._start_job(node, port) for node in nodes]
            if self.case.fault:
                self._hurt(daemons[0], jobs[0])
            code = self._wait(jobs)
        finally:
            for process in (*jobs, *daemons):
                _end(process)
        self._check(code)  # the daemon has written what it knows
        return self._measured() if daemons else 0

    def _wait(self, jobs: Sequence[subprocess.Popen[bytes]]) -> int:
        ends_s = time.monotonic() + self.case.timeout_s
        try:
            return max(abs(job.wait(max(0.0, ends_s - time.monotonic()))) for job in jobs)
        except subprocess.TimeoutExpired:
            late = f"it hung, or took more than {self.case.timeout_s:.0f} s: {self._last_words()}"
            raise NotAsItMust(late) from None

    def _start_daemon(self, node: int) -> subprocess.Popen[bytes]:
        words = ["-m", "zerotune.tuner.cli", "daemon", "--store", str(self.folder / f"{node}.db")]
        return self._start([self.python, *words], node, f"daemon{node}.log")

    def _start_job(self, node: int, port: int) -> subprocess.Popen[bytes]:
        case, environment = self.case, self.python.parent
        rehearsal: list[str | Path] = [self.python, "-m", "benchmarks.rehearse", case.fabric]
        rehearsal += ["--moves-mb", str(case.moves_mb), "--", self.python, "-m"]
        if case.module:
            return self._start([*rehearsal, case.module, *case.words], node, f"{node}.log")
        torchrun = [environment / "torchrun", "--nproc-per-node", case.n_ranks // case.n_nodes]
        torchrun += ["--nnodes", case.n_nodes, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port]
        words = ["--steps", str(case.n_steps), "--losses", str(self.folder / "losses"), *case.words]
        launch = ["zerotune.tuner.cli", "launch", "--"]
        return self._start([*rehearsal, *launch, *torchrun, case.script, *words], node, f"{node}.log")

    def _start(self, command: Sequence[object], node: int, log: str) -> subprocess.Popen[bytes]:
        quick = {"ZEROTUNE_TICK_MS": "50", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FRAMEWORK_SCRIPTS)}
        quick["ZEROTUNE_ENDPOINT"] = f"ipc://{self.folder}/{node}.sock"
        if self.case.n_gpus:
            quick["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(self.case.n_gpus)))
        with (self.folder / log).open("wb") as file:
            return subprocess.Popen(
                [str(word) for word in command], stdout=file, stderr=file, env={**os.environ, **quick},
                cwd=REPOSITORY, start_new_session=True, preexec_fn=_limit,
            )  # fmt: skip

    def _hurt(self, daemon: subprocess.Popen[bytes], job: subprocess.Popen[bytes]) -> None:
        self._until(lambda: self._n_losses() >= 10 or job.poll() is not None, "training did not begin", 200)
        if self.case.fault == "daemon":
            daemon.kill()
        else:
            os.kill(_rank_pid(job.pid), signal.SIGKILL)

    def _check(self, code: int) -> None:
        words = self.log.read_text(errors="replace")
        if HANGS in words:
            raise NotAsItMust(f"ranks disagreed: {words[words.index(HANGS) :].splitlines()[0]}")
        if self.case.fault == "rank":
            if code == 0:
                raise NotAsItMust("a rank was killed, and the job ended as if nothing had happened")
            return
        if code != 0:
            raise NotAsItMust(f"exit code {code}: {self._last_words()}")
        if self.case.trains and not self.case.fault and self._measured() == 0 and tells_times(self.python):
            raise NotAsItMust("nothing was measured")
        if self.case.withdraws and not self._count("decisions where kind = 'rollback' and reason like '%steps%'"):
            raise NotAsItMust("steps were slower, and nothing was withdrawn")
        share = time_over_best(self.store, self.case.fabric) if self.case.finds else 0.0
        if share > self.case.finds:
            raise NotAsItMust(f"what it settled on takes {share:.3f} times the best")

    def _n_losses(self) -> int:
        file = self.folder / "losses" / "rank0.txt"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def _measured(self) -> int:
        return self._count("measurements")

    def _count(self, rows: str) -> int:
        with sqlite3.connect(self.store) as store:
            return int(store.execute(f"select count(*) from {rows}").fetchone()[0])

    def _until(self, is_so: Callable[[], bool], otherwise: str, timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > ends_s:
                raise NotAsItMust(f"{otherwise}: {self._last_words()}")
            time.sleep(0.1)

    def _last_words(self) -> str:
        return last_words(self.log.read_text(errors="replace"))


def _rank_pid(launcher: int) -> int:
    """The second rank's process below torchrun, which `launch` has become."""
    ranks = [one for one in psutil.Process(launcher).children(recursive=True) if "LOCAL_RANK" in one.environ()]
    return int(next(one.pid for one in ranks if one.environ()["LOCAL_RANK"] == "1"))


def _limit() -> None:
    """No core dumps, and a limit of memory: a tensor's size may come from a kernel that computes nothing."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with all its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


if __name__ == "__main__":
    sys.exit(main())
