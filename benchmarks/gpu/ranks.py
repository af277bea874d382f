"""Ranks as processes: each on a GPU of its own, on one that all of them share, or on the emulated NCCL.

NCCL refuses two ranks with one host and one GPU. Ranks that share a GPU therefore claim to be hosts of their own
(NCCL_HOSTID), and all traffic goes over sockets on the loopback interface. Algorithms, protocols, plugins and plans are
real; links are not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.free_port import free_port
from benchmarks.lib.last_words import last_words

SHARED_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    # Sockets of unreadable speed count as 10 Gb/s, for which NCCL would open few channels.
    "NCCL_MIN_CTAS": "16",
    "NCCL_MAX_CTAS": "16",
    "GLOO_SOCKET_IFNAME": "lo",
}
TAIL_BYTES = 30_000
"""Of a log, in which the error is searched: torch and NCCL print some hundred lines of warnings after it."""


@dataclass(frozen=True)
class Machine:
    """The NCCL and the GPUs of ranks. Without a `fabric` NCCL is real. Ranks share one GPU if there are too few."""

    fabric: str | None
    n_ranks: int
    mps_folder: Path | None = None
    n_gpus: int = 1

    def environment(self, rank: int, n_ranks: int, port: int) -> dict[str, str]:
        """Variables that one rank needs beyond our own environment."""
        named = {
            "RANK": str(rank), "WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        }  # fmt: skip
        if self.fabric is not None:
            return {**named, "ZEROTUNE_FABRIC": self.fabric, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        if self.n_gpus >= self.n_ranks:
            return {**named, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n_ranks)}
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        mps = {"CUDA_MPS_PIPE_DIRECTORY": str(self.mps_folder)} if self.mps_folder else {}
        return {**named, **SHARED_GPU, **mps, "CUDA_VISIBLE_DEVICES": gpu, "NCCL_HOSTID": f"zerotune-r{rank}"}


class RanksFailed(Exception):
    """A rank failed or did not end in time; the message has its last words."""


class Ranks:
    """One process per rank of one command; killed as a whole."""

    def __init__(
        self, machine: Machine, command: Sequence[str], folder: Path, *, n_ranks: int | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        n_ranks, port = n_ranks or machine.n_ranks, free_port()
        self._logs = [folder / f"rank{rank}.log" for rank in range(n_ranks)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, path in enumerate(self._logs):
            environment = {**os.environ, **machine.environment(rank, n_ranks, port), **(extra or {})}
            with path.open("wb") as log:
                self.processes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                )

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended well.

        Raises:
            RanksFailed: one failed, or the time is up; none is left running.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                codes = [process.poll() for process in self.processes]
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed:
                    raise RanksFailed(f"rank {failed[0]} ended with {codes[failed[0]]}: {self._tail(failed[0])}")
                if None not in codes:
                    return
                if time.monotonic() > deadline_s:
                    raise RanksFailed(
                        f"hung or too slow: rank {codes.index(None)} did not end within {timeout_s:.0f} s"
                    )
                time.sleep(0.05)
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _tail(self, rank: int) -> str:
        return last_words(self._logs[rank].read_bytes()[-TAIL_BYTES:].decode(errors="replace"))
