"""Runs a script as a user would, under `zerotune launch`, and collects what the job left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from zerotune.store.records import Collective, Phase
from zerotune.tuner.client.background_daemon import start_in_background
from zerotune.tuner.offline import stage_command
from zerotune.tuner.traces.own.reader import OwnTrace, read_own, trace_files

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
FABRIC = "ethernet_boxes"
N_RANKS = 2
OUTSIDE_BACKWARD = dict.fromkeys(
    ("all_gather forward_gather", "all_gather post_step_gather"), "all_gather outside_backward"
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N_RANKS}")


@dataclass(frozen=True)
class Testimony:
    """What the emulated NCCL did on one rank, told by the witness; calls are in order of completion."""

    rank: int
    calls: Sequence[Sequence[int]]
    """(communicator, collective, bytes, algorithm, protocol, channels) of each call that has a setting."""
    n_disagreements: int
    counters: dict[str, int]
    n_errors: int = 0

    def of(self, communicator: int, collective: int) -> list[tuple[int, ...]]:
        """(bytes, algorithm, protocol, channels) of one communicator's calls of a kind, in order."""
        return [tuple(call[2:]) for call in self.calls if tuple(call[:2]) == (communicator, collective)]


@dataclass(frozen=True)
class Finished:
    """A job that ended well: per rank its losses, its testimony and its trace."""

    losses: dict[str, str]
    testimonies: list[Testimony]
    traces: list[OwnTrace]
    output: str
    trace: Path

    @property
    def stage(self) -> str:
        """What the stage fingerprint makes of rank 0's collectives."""
        return stage_command.read(self.trace).shown.stage.name


class Job:
    """One run of a script, started at once; `finish` waits for it."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        launch: Sequence[str] | None,
        ranks: Sequence[int | None] = (None,),
        **environment: str,
    ) -> None:
        """`launch` None runs the plain command; `ranks` starts one process per rank instead of a launcher."""
        self._folder = folder
        (folder / "witness").mkdir(parents=True)
        prefix = (
            []
            if launch is None
            else [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--fabric", FABRIC, *launch]
        )
        if launch is not None and "--no-agent" not in launch:
            prefix += ["--log-trace", str(folder / "trace")]
        prefix += [] if launch is None else ["--"]
        python_path = os.pathsep.join(filter(None, [str(HERE / "witness"), os.environ.get("PYTHONPATH")]))
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
            "ZEROTUNE_TICK_MS": "20", "ZEROTUNE_WITNESS": str(folder / "witness"), "PYTHONPATH": python_path,
            **environment,
        }  # fmt: skip
        self._log = (folder / "log").open("wb")
        self._processes = []
        for rank in ranks:
            own = {} if rank is None else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(ranks))}
            self._processes.append(
                subprocess.Popen(
                    [*prefix, *command, "--losses", str(folder / "losses")],
                    stdout=self._log, stderr=self._log, env=env | own, start_new_session=True,
                )
            )  # fmt: skip

    def finish(self, timeout_s: float) -> Finished:
        try:
            codes = [process.wait(timeout_s) for process in self._processes]
        finally:
            self.kill()
        output = (self._folder / "log").read_text(errors="replace")
        assert codes == [0] * len(codes), output[-4000:]
        losses = {
            str(path.relative_to(self._folder)): path.read_text()
            for path in sorted((self._folder / "losses").rglob("rank*.txt"))
        }
        documents = [json.loads(path.read_text()) for path in (self._folder / "witness").iterdir()]
        testimonies = [Testimony(**{"counters": {}, **document}) for document in documents]
        trace = self._folder / "trace"
        return Finished(
            losses,
            sorted(testimonies, key=lambda testimony: testimony.rank),
            [read_own(path) for path in trace_files(trace)] if trace.exists() else [],
            output,
            trace,
        )

    def kill(self) -> None:
        """End whatever is left of it; torchrun's ranks are in sessions of their own."""
        for process in self._processes:
            if process.poll() is None:
                for descendant in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        descendant.kill()
                process.kill()
                process.wait()
        self._log.close()


class Node:
    """A daemon with a store of its own, which starts while the first job does: neither needs the other to begin."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/d.sock"
        self._pool = ThreadPoolExecutor(1)
        # Some frameworks need minutes on a busy machine before their first step.
        self._daemon = self._pool.submit(start_in_background, self.endpoint, folder / "store.db", idle_exit_s=3600)

    def close(self) -> None:
        daemon = self._daemon.result()
        self._pool.shutdown()
        daemon.terminate()
        daemon.wait(30)


# ---- what must be true of a finished job ----


def decisions(trace: OwnTrace) -> Any:
    return trace.records[(trace.records["flags"] & 2) == 0]


def timed(trace: OwnTrace) -> Any:
    return trace.records[(trace.records["flags"] & 2) != 0]


def check_all_seen(job: Finished) -> int:
    """Every call that the emulated NCCL ran was seen, with the setting that ran; returns how many were recorded.

    The plugin counts from the first call on. Records begin at the first boundary, where ranks meet: of each
    communicator and collective they must be a tail without gaps of what ran.
    """
    n_recorded = 0
    assert [trace.header.rank for trace in job.traces] == [testimony.rank for testimony in job.testimonies]
    for testimony, trace in zip(job.testimonies, job.traces, strict=True):
        assert testimony.n_disagreements == 0
        assert testimony.n_errors == 0
        assert testimony.counters["n_calls"] == len(testimony.calls)
        assert trace.ended
        n_lost = testimony.counters["n_lost_events"] + testimony.counters["n_abandoned_events"]
        n_missing = 0
        for records, has_settings in ((decisions(trace), False), (timed(trace), True)):
            for communicator, collective in sorted(set(zip(records["comm_id"], records["collective"], strict=True))):
                own = records[(records["comm_id"] == communicator) & (records["collective"] == collective)]
                own = np.sort(own, order="sequence")  # threads that wait for collectives finish them in any order
                ran = testimony.of(int(communicator), int(collective))
                n_missing += len(ran) - 1 - int(own["sequence"][-1])
                ran = ran[-len(own) :]
                n_missing += int(own["sequence"][-1] - own["sequence"][0]) + 1 - len(own)
                if n_missing == 0:
                    assert own["message_bytes"].tolist() == [call[0] for call in ran]
                    if has_settings:
                        settings = zip(own["algorithm"], own["protocol"], own["n_channels"], strict=True)
                        assert [tuple(map(int, setting)) for setting in settings] == [call[1:] for call in ran]
        assert n_missing == trace.n_dropped + n_lost
        n_recorded += len(decisions(trace))
    return n_recorded


def check_agreed(job: Finished) -> int:
    """All ranks decided each call under the same epoch; returns the highest epoch."""
    reference = None
    for trace in job.traces:
        own = decisions(trace)
        keys = zip(own["comm_id"].tolist(), own["collective"].tolist(), own["sequence"].tolist(), strict=True)
        epochs = dict(zip(keys, zip(own["epoch"].tolist(), own["step"].tolist(), strict=True), strict=True))
        assert reference is None or epochs == reference
        reference = epochs
    assert reference
    return max(epoch for epoch, _ in reference.values())


def step_of(trace: OwnTrace, step: int) -> Counter[str]:
    """How often each (collective, phase) was decided on in a step; a negative one counts from the end."""
    own = decisions(trace)
    if step < 0:
        step += int(own["step"].max()) + 1
    rows = own[own["step"] == step]
    return Counter(
        f"{Collective(collective).name} {Phase(phase).name}"
        for collective, phase in zip(rows["collective"], rows["phase"], strict=True)
    )


def blur(step: Mapping[str, int]) -> Counter[str]:
    """`step` with the two phases as one whose difference no hook can see.

    Between the optimizer's step and the next backward a gather may bring updated parameters home or begin the
    forward pass. Which of them, the stage fingerprint says, from the whole sequence, and may take a while.
    """
    blurred: Counter[str] = Counter()
    for name, n in step.items():
        blurred[OUTSIDE_BACKWARD.get(name, name)] += n
    return blurred
