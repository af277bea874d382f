"""This process's libnccl, on a mock GPU of the fabric's machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.emulated.errors import EmulatedNcclError
from zerotune.agent.nccl.fabric import Fabric
from zerotune.agent.nccl.libnccl import Libnccl
from zerotune.agent.nccl.mock_cuda.device_functions import DeviceFunction, device_functions
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.mock_cuda.mock import MockCuda
from zerotune.agent.nccl.mock_cuda.timing_source import records_say_emulated
from zerotune.agent.nccl.release import Release


class LibraryProcess:
    """See the module; one per process, since a rank has one GPU.

    Raises:
        UserError: the library or its release cannot be used.
        PluginError: the mock cannot be built, or not be put into the library.
    """

    def __init__(self, path: Path, fabric: Fabric, global_rank: int) -> None:
        assert fabric.node is not None
        node, self.device = divmod(global_rank, fabric.ranks_per_node)
        # NCCL reads the file by its name, whenever a communicator is made: it stays open.
        topology = os.memfd_create("topology.xml", os.MFD_CLOEXEC)
        os.write(topology, fabric.node.topology.encode())
        name = f"/proc/{os.getpid()}/fd/{topology}"
        self.mock: Final = MockCuda()
        self.mock.lend(read_machine(Path(name)), f"{fabric.name}-{node}")
        if limits := fabric.nccl_algo():
            os.environ.setdefault("NCCL_ALGO", limits)
        self.nccl: Final = Libnccl(path)
        base = self.mock.attach(path, self.nccl.library, self.nccl.version)
        self.functions: Final[dict[int, DeviceFunction]] = device_functions(path, base)
        self.release: Final = Release(self.nccl.version)
        self.mock.set_waiting(True)
        records_say_emulated(os.environ.get("NCCL_PROFILER_PLUGIN", ""))


_process: LibraryProcess | None = None
_of: tuple[Path, str, int] | None = None


def library_process(path: Path, fabric: Fabric, global_rank: int) -> LibraryProcess:
    """The process's only one, made at the first call.

    Args:
        path: of libnccl.
        fabric: whose machine is lent.
        global_rank: of this process: where it is on the fabric.

    Returns:
        The same whenever it is called.

    Raises:
        EmulatedNcclError: it was made for another library, fabric or rank.
        UserError, PluginError: as LibraryProcess.
    """
    global _process, _of
    asked = (path, fabric.name, global_rank)
    if _process is None:
        _process, _of = LibraryProcess(path, fabric, global_rank), asked
    if _of != asked:
        raise EmulatedNcclError(f"this process runs NCCL as {_of}: it cannot be {asked}, too")
    return _process
