"""Two ranks of the real NCCL on the mock GPU, as threads of this process. For programs: the mock takes CUDA's place."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from zerotune.agent.nccl import library
from zerotune.agent.nccl.libnccl import BFLOAT16, Libnccl
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.mock_cuda.mock import MockCuda
from zerotune.agent.nccl.twin.machines import MACHINES
from zerotune.store.records import Collective

COUNT = 1 << 18
PATIENCE_S = 5.0


class TwoRanks:
    """Both ranks on one node with our plugin in both places, and a communicator of theirs."""

    def __init__(
        self,
        libnccl: Path,
        folder: Path,
        kernel_us: float = 25.0,
        *,
        counts_unwatched: bool = False,
        mock: MockCuda | None = None,
    ) -> None:
        topology = folder / "topology.xml"
        topology.write_text(MACHINES["dgx_h100"].topology())
        self.mock = mock or MockCuda()
        self.mock.set_machine(read_machine(topology), "node")
        self.plugin = library.load()
        name = self.plugin.path.name
        os.environ.update(NCCL_TUNER_PLUGIN=name, NCCL_PROFILER_PLUGIN=name)
        self.nccl = Libnccl(libnccl)
        self.mock.attach(libnccl, self.nccl.library, self.nccl.version, counts_unwatched=counts_unwatched)
        self.mock.set_duration_us(kernel_us)
        self.buffers = (self.mock.malloc(4 * COUNT), self.mock.malloc(4 * COUNT))
        self.communicators = [0, 0]
        unique_id = self.nccl.unique_id()

        def connect(rank: int) -> None:
            self.communicators[rank] = self.nccl.init_rank(2, unique_id, rank)

        self.on_both(connect)

    def on_both(self, work: Callable[[int], None]) -> None:
        """`work` with each rank, at once."""

        def run(rank: int) -> None:
            self.mock.set_device(rank)
            work(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def call(self, collective: Collective, count: int = COUNT) -> None:
        """One collective of bfloat16, on both."""
        self.on_both(lambda rank: self.nccl.call(collective, self.communicators[rank], self.buffers, count, BFLOAT16))

    def wait_for(self, n_timed: int) -> None:
        """Until the plugin has timed so many, or patience ends."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.plugin.counters().n_timed < n_timed and time.monotonic() < deadline_s:
            time.sleep(0.01)
