"""The worker processes of a sweep: started together, watched, and killed together if one hangs."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Final

import msgspec

from ....agent.nccl import compiled
from ....store.errors import UserError
from ....store.foreign.own_python import python_with
from ....store.records import Collective, Outcome
from ...scratch import ScratchFolder
from .protocol import ASK_CHUNK_SIZE, Failed, Measure, MeasuredCalls, Ready, Reply, Stop, reply_of, to_line

START_TIMEOUT_S: Final = 90.0
GRACE_S: Final = 1.0
"""Wait for the other ranks' messages after one rank has failed."""


class GroupFailure(Exception):
    """The group has ended, as a setting hung or failed; the sweep records that and goes on."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class WorkerGroup:
    """One process group of `n_ranks` local processes; a context manager."""

    def __init__(
        self, n_ranks: int, fabric: str | None, collectives: Sequence[Collective], *, asks_chunk_size: bool = False
    ) -> None:
        self._folder = ScratchFolder("zerotune-sweep-")
        self._logs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pending = [b""] * n_ranks
        backend = "nccl" if fabric is None else "emulated_nccl"
        plugin = str(compiled.PLUGIN.build())
        command = [
            *python_with("zerotune.tuner.offline.sweep.worker"),
            backend,
            f"file://{self._folder.path}/rendezvous",
            ASK_CHUNK_SIZE if asks_chunk_size else "",
        ]
        command += [collective.name for collective in collectives]
        environment = {**os.environ, "NCCL_TUNER_PLUGIN": plugin, "NCCL_PROFILER_PLUGIN": plugin}
        environment |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "OMP_NUM_THREADS": "1"}
        environment.pop("ZEROTUNE_LAUNCH", None)
        if fabric is not None:
            environment |= {"ZEROTUNE_FABRIC": fabric, "ZEROTUNE_COMPUTE": "none"}
        try:
            for rank in range(n_ranks):
                log = (self._folder.path / f"rank{rank}.log").open("w+b")
                self._logs.append(log)
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        start_new_session=True,  # Ctrl-C only reaches the sweep, which then stops the workers
                    )
                )
            self.ready = self._started()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        self.kill()

    def measure(self, command: Measure, timeout_s: float) -> list[MeasuredCalls]:
        """Every rank's measurement; GroupFailure, which ends the group, if the setting hung or failed."""
        line = to_line(command)
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError as error:
                raise self._failure(Outcome.failed, "a worker has died") from error
        replies = self._gather(timeout_s)
        return [reply for reply in replies if isinstance(reply, MeasuredCalls)]

    def stop(self) -> None:
        """Let the workers leave the process group and end."""
        for process in self._processes:
            if process.stdin is not None and process.poll() is None:
                try:
                    process.stdin.write(to_line(Stop()))
                    process.stdin.close()
                except OSError:
                    continue
        deadline_s = time.monotonic() + 10
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def kill(self) -> None:
        """End the workers at once and clean up; may be called twice."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        continue
        for log in self._logs:
            log.close()
        self._processes, self._logs = [], []
        self._folder.cleanup()

    def _started(self) -> Ready:
        try:
            replies = self._gather(START_TIMEOUT_S)
        except GroupFailure as failure:
            raise UserError(f"the sweep's workers do not start: {failure.reason}", "mend that and try again") from None
        first = replies[0]
        assert isinstance(first, Ready)
        return first

    def _gather(self, timeout_s: float) -> list[Reply]:
        """One reply from every rank."""
        replies: list[Reply | None] = [None] * len(self._processes)
        deadline_s = time.monotonic() + timeout_s
        failure: GroupFailure | None = None
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while any(reply is None for reply in replies):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    raise failure or self._failure(Outcome.hung, f"no answer within {timeout_s:.0f} s")
                for key, _ in ready:
                    reply = self._read(key.data, key.fd)
                    if reply is None:
                        continue
                    selector.unregister(key.fileobj)
                    replies[key.data] = reply
                    if isinstance(reply, Failed) and failure is None:
                        failure = self._failure(Outcome.failed, f"rank {key.data}: {reply.reason}")
                        deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        if failure is not None:
            raise failure
        return [reply for reply in replies if reply is not None]

    def _read(self, rank: int, descriptor: int) -> Reply | None:
        """The rank's reply once its line is complete; a closed pipe is a failure."""
        text = os.read(descriptor, 1 << 16)
        self._pending[rank] += text
        if not text:
            return Failed(f"it ended: {self._last_words(rank)}")
        if not self._pending[rank].endswith(b"\n"):
            return None
        line, self._pending[rank] = self._pending[rank], b""
        try:
            return reply_of(line)
        except msgspec.MsgspecError as error:
            return Failed(f"it answered nonsense: {error}")

    def _last_words(self, rank: int) -> str:
        log = self._logs[rank]
        log.flush()
        log.seek(0)
        lines = log.read()[-4000:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    def _failure(self, outcome: Outcome, reason: str) -> GroupFailure:
        return GroupFailure(outcome, reason)


def joined_us(ranks: Sequence[MeasuredCalls]) -> list[float]:
    """Durations joined over ranks (us): each collective's is that of the last rank to arrive, the shortest."""
    return [min(seen) for seen in zip(*(one.duration_us for one in ranks), strict=True)]
