"""The mock as Python sees it: attached to a libnccl, told what machine to lend, asked what was launched."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zerotune.agent.nccl.compiled import MOCK_CUDA
from zerotune.agent.nccl.mock_cuda.layouts import LayoutFields, layout_of
from zerotune.agent.nccl.mock_cuda.machine import MAX_DEVICES, Machine
from zerotune.agent.nccl.mock_cuda.symbols import Symbol, exported_functions, functions
from zerotune.store.errors import PluginError, UserError

CUDA_VERSION: Final = 12090
"""CUDA 12.9, which every release from 2.21 on takes for new enough."""
Price = Callable[[int, int, int, int, int, int], float]
"""Microseconds of a collective, `mock_price` in mock_cuda.h."""
_PRICE: Final = ctypes.CFUNCTYPE(
    ctypes.c_double, ctypes.c_int, ctypes.c_int, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64
)
RING_WORKS: Final = 65536
"""As in launch.c: far more collectives than all ranks of a node launch between two drains."""
MAX_OWN_WORKS: Final = 4096
"""As in launch.c: works of one group."""
WORK: Final = np.dtype(
    [("launch", "<u8"), ("communicator", "<u8"), ("stream", "<u8"), ("count", "<u8"), ("channel_mask", "<u8"),
     ("function_id", "<u4"), ("device", "<u4"), ("number", "<u4"), ("reserved", "<u4")]
)  # fmt: skip
"""One collective of one launch: `mock_work` in mock_cuda.h."""
QUEUE: Final = 1024
"""Kernels that a stream takes before its host waits, as on GPUs; N_AHEAD of streams.c."""
HOST_US: Final = 26.0
"""Microseconds that a GPU waits for a function of the host: a round trip at each replay of a graph, as the authors of
torchcomms measured it (github.com/meta-pytorch/torchcomms/pull/1203). NCCL's comment calls it costly without a figure.
"""
FORCE: Final = "ZEROTUNE_MOCK_CUDA"
"""Variable that lets the mock load beside a CUDA driver, by the value `force`."""
DRIVER_FILES: Final = ("/dev/nvidiactl", "/dev/dxg")
"""Devices of NVIDIA's driver on Linux, and below Windows."""


class Patched(IntEnum):
    """What a library is to the mock; as in mock_cuda.h."""

    runtime_of_nccl = 0
    runtime = 1
    blas = 2


class _Device(ctypes.Structure):
    _fields_ = [
        ("bus_id", ctypes.c_char * 16),
        ("name", ctypes.c_char * 64),
        ("capability", ctypes.c_int32),
        ("n_multiprocessors", ctypes.c_int32),
        ("memory_bytes", ctypes.c_uint64),
    ]


class _Nic(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 32),
        ("guid", ctypes.c_uint64),
        ("speed_mbps", ctypes.c_int32),
        ("port", ctypes.c_int32),
        ("reaches_gpu_memory", ctypes.c_int32),
        ("is_sharp", ctypes.c_int32),
        ("latency_us", ctypes.c_float),
    ]


class _Machine(ctypes.Structure):
    _fields_ = [
        ("n_devices", ctypes.c_uint32),
        ("n_nics", ctypes.c_uint32),
        ("cuda_version", ctypes.c_int32),
        ("multicast", ctypes.c_int32),
        ("devices", _Device * MAX_DEVICES),
        ("nics", _Nic * MAX_DEVICES),
    ]


class Graph:
    """What a stream captured; given up with the last reference, or by `destroy`."""

    def __init__(self, call: Callable[..., None], stream: int, graph: int) -> None:
        self._call, self._graph, self._stream = call, ctypes.c_void_p(graph), ctypes.c_void_p(stream)
        self.destroy = weakref.finalize(self, _destroy, call, self._stream, self._graph)

    def launch(self) -> None:
        """Run it once more; PluginError."""
        self._call("cudaGraphLaunch", self._graph, self._stream)


def _destroy(call: Callable[..., None], stream: ctypes.c_void_p, graph: ctypes.c_void_p) -> None:
    call("cudaGraphDestroy", graph)
    call("cudaStreamDestroy", stream)


class MockCuda:
    """The mock in this process; make one before libnccl is opened, since it also stands in for NVML.

    Args:
        in_front: of NCCL's API and the CUDA driver, for all libraries that are loaded later.

    Raises:
        PluginError: it cannot be built or loaded.
        UserError: a CUDA driver is in use on this machine.
    """

    def __init__(self, *, in_front: bool = False) -> None:
        refuse_beside_a_driver()
        path = MOCK_CUDA.build()
        try:
            self._library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL if in_front else ctypes.DEFAULT_MODE)
        except OSError as error:
            raise PluginError(f"the mock CUDA cannot be loaded: {error}") from error
        self.path: Final = path
        pointer, count = ctypes.c_void_p, ctypes.c_size_t
        self._patch = self._bind("patch", ctypes.c_int, pointer, pointer, pointer, count, ctypes.c_int)
        self._take_calls = self._bind("take_calls", ctypes.c_int, pointer)
        self._set_machine = self._bind("set_machine", None, pointer)
        self._set_layout = self._bind("set_layout", None, pointer)
        self._set_device = self._bind("set_device", None, ctypes.c_int)
        self._malloc = self._bind("malloc", ctypes.c_int, ctypes.POINTER(pointer), count)
        self._n_freed_uses = self._bind("n_freed_uses", ctypes.c_uint64)
        self._set_duration_us = self._bind("set_duration_us", None, ctypes.c_double)
        self._set_timer_step_ns = self._bind("set_timer_step_ns", None, ctypes.c_uint64)
        self._set_away_ms = self._bind("set_away_ms", None, ctypes.c_double)
        self._set_queue = self._bind("set_queue", None, ctypes.c_uint32)
        self._set_recording = self._bind("set_recording", None, ctypes.c_int)
        self._drain = self._bind("drain", count, pointer, count)
        self._drained = np.empty(RING_WORKS, WORK)
        self._set_waiting = self._bind("set_waiting", None, ctypes.c_int)
        self._take = self._bind("take", count, pointer, count)
        self._set_prices = self._bind("set_prices", None, _PRICE, *[ctypes.c_double] * 4)
        self._set_nccl = self._bind("set_nccl", None, pointer)
        self._set_node = self._bind("set_node", None, ctypes.c_int)
        self._set_most_bytes = self._bind("set_most_bytes", None, ctypes.c_uint64)
        self._price: Any = None  # as long as the library may call it
        self._function = self._bind("function", pointer, ctypes.c_char_p)
        self._finish = self._bind("finish", ctypes.c_int, ctypes.c_uint64, pointer, pointer, count)

    def _bind(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, f"mock_cuda_{name}")
        function.restype = result
        function.argtypes = arguments
        return function

    def lend(self, machine: Machine, node: str, cuda_version: int = CUDA_VERSION) -> None:
        """Describe the node whose GPUs and network adapters this process sees; NCCL reads the rest in the environment.

        Args:
            machine: the node's kind; its file must stay where it is.
            node: its name: NCCL takes ranks on one node for neighbours.
            cuda_version: 12090 = 12.9.
        """
        os.environ.update(
            NCCL_TOPO_FILE=str(machine.path),
            NCCL_HOSTID=node,
            NCCL_SOCKET_IFNAME="lo",
            NCCL_NET_PLUGIN=str(self.path) if machine.nics else "none",
            # 2.28 and newer unload it with the last communicator, and 2.29 then forgets its name.
            NCCL_NET_PLUGIN_REF_COUNT="1",
        )
        fields = _Machine(len(machine.gpus), len(machine.nics), cuda_version, int(machine.multicast))
        for i, gpu in enumerate(machine.gpus):
            name = f"mock sm{gpu.capability}".encode()
            fields.devices[i] = (gpu.bus_id.encode(), name, gpu.capability, gpu.n_multiprocessors, gpu.memory_bytes)
        for i, nic in enumerate(machine.nics):
            fields.nics[i] = (
                *(nic.name.encode(), nic.guid, nic.speed_mbps, nic.port),
                *(int(nic.reaches_gpu_memory), int(nic.is_sharp), nic.latency_us),
            )
        self._set_machine(ctypes.byref(fields))

    def attach(
        self, path: Path, library: ctypes.CDLL, version: tuple[int, ...], *, counts_unwatched: bool = False
    ) -> int:
        """Put the mock in place of the CUDA runtime within a loaded libnccl.

        Args:
            path: the library's file.
            library: the same, opened.
            version: its release, (major, minor, patch).
            counts_unwatched: count works that no profiler follows, as real kernels do and NCCL's host from 2.31 on does
                not: times shift.

        Returns:
            Where it is loaded.

        Raises:
            UserError: the file is no such library, or its release is not known.
            PluginError: the library's code cannot be replaced.
        """
        layout = layout_of(version)
        if counts_unwatched:
            layout = layout._replace(counts_watched_only=0)
        found = functions(path)
        origin = next((each.address for each in found if each.name == "ncclGetVersion"), None)
        cuda = [each for each in found if _is_of(each.name, "cuda")]
        if origin is None or not cuda:
            raise UserError(f"{path} does not hold NCCL and CUDA's runtime", "take the library of NVIDIA's wheel")
        base = (ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value or 0) - origin
        self._replace(path, base, cuda, Patched.runtime_of_nccl)
        self._take_calls(base + cuda[0].address)  # where they cannot be found, it only takes longer and leaves files
        self._set_layout(ctypes.byref(LayoutFields(*layout)))
        return base

    def replace_exports(self, path: Path, library: ctypes.CDLL, prefix: str, kind: Patched) -> int:
        """Put the mock in place of what a loaded library exports.

        Args:
            path: the library's file.
            library: the same, opened.
            prefix: of the functions' names.
            kind: what the library is.

        Returns:
            How many functions.

        Raises:
            UserError: it has none.
            PluginError: its code cannot be replaced.
        """
        found = [each for each in exported_functions(path) if _is_of(each.name, prefix)]
        if not found:
            raise UserError(f"{path} has no functions {prefix}*", "install NVIDIA's wheel again")
        base = (ctypes.cast(library[found[0].name], ctypes.c_void_p).value or 0) - found[0].address
        self._replace(path, base, found, kind)
        return len(found)

    def _replace(self, path: Path, base: int, found: Sequence[Symbol], kind: Patched) -> None:
        names = (ctypes.c_char_p * len(found))(*(each.name.encode() for each in found))
        addresses = (ctypes.c_void_p * len(found))(*(base + each.address for each in found))
        sizes = (ctypes.c_uint64 * len(found))(*(each.n_bytes for each in found))
        if self._patch(names, addresses, sizes, len(found), int(kind)) != 0:
            raise PluginError(f"the mock CUDA cannot be put into {path}: its code cannot be written to")

    def stand_in_front_of(self, nccl: ctypes.CDLL) -> None:
        """From now on the collectives that torch calls come by here."""
        self._set_nccl(nccl._handle)

    def set_node(self, node: int) -> None:
        """Which node of the cluster this process is on."""
        self._set_node(node)

    def set_most_bytes(self, n_bytes: int) -> None:
        """From now on nothing travels that is larger than this on each rank."""
        self._set_most_bytes(n_bytes)

    def set_prices(
        self, price: Price, noise: float, kernel_us: float, flops_per_ns: float, host_us: float = HOST_US
    ) -> None:
        """Let kernels run in their streams, for their time.

        Args:
            price: what a collective takes, by ranks, nodes, device function, channels, count and bytes per element.
            noise: standard deviation of a collective's time, relative.
            kernel_us: of a kernel that is no collective.
            flops_per_ns: rate of matrix products.
            host_us: what the GPU waits for a function of the host, besides its own time.
        """
        self._price = _PRICE(price)
        self._set_prices(self._price, noise, kernel_us, flops_per_ns, host_us)

    def set_device(self, device: int) -> None:
        """Which GPU the calling thread uses."""
        self._set_device(device)

    def malloc(self, n_bytes: int) -> int:
        """Address of new device memory of the calling thread's GPU.

        Raises:
            PluginError: the GPU has no room for it.
        """
        pointer = ctypes.c_void_p()
        if self._malloc(ctypes.byref(pointer), n_bytes) != 0:
            raise PluginError(f"the mock GPU has no room for {n_bytes} bytes")
        return pointer.value or 0

    def free(self, address: int) -> None:
        """Give device memory back, once all that runs is over; PluginError where there is none."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def n_freed_uses(self) -> int:
        """How many kernels and copies ran when memory that they use was freed; standard error names each kind."""
        return int(self._n_freed_uses())

    def begin_capture(self) -> int:
        """A new stream of the calling thread's GPU, which captures what is put into it, for `end_capture`."""
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreate", ctypes.byref(stream))
        self._call("cudaStreamBeginCapture", stream, 0)
        return stream.value or 0

    def end_capture(self, stream: int) -> Graph:
        """What a stream has captured since `begin_capture`; PluginError where it does not capture."""
        graph = ctypes.c_void_p()
        self._call("cudaStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        return Graph(self._call, stream, graph.value or 0)

    def used_bytes(self, device: int) -> int:
        """Memory of a GPU that is in use."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.set_device(device)
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    def _call(self, name: str, *arguments: Any) -> None:
        address = self._function(name.encode())
        if address is None or ctypes.CFUNCTYPE(ctypes.c_int)(address)(*arguments) != 0:
            raise PluginError(f"{name} failed on the mock GPU")

    def set_duration_us(self, duration_us: float) -> None:
        """How long kernels take."""
        self._set_duration_us(duration_us)

    def set_timer_step_ns(self, step_ns: int) -> None:
        """The GPU's timer ticks; 1000 on some machines."""
        self._set_timer_step_ns(step_ns)

    def set_away_ms(self, away_ms: float) -> None:
        """How long NCCL's threads are descheduled whenever they find nothing to do."""
        self._set_away_ms(away_ms)

    def set_queue(self, n_kernels: int) -> None:
        """How many kernels a stream takes before its host waits, at most QUEUE."""
        self._set_queue(n_kernels)

    def set_recording(self, on: bool) -> None:
        """Turn on or off that launches are kept for `drain`."""
        self._set_recording(int(on))

    def drain(self) -> NDArray[np.void]:
        """Collectives launched since, oldest first, as an array of WORK."""
        n_works = self._drain(self._drained.ctypes.data, RING_WORKS)
        return self._drained[:n_works].copy()

    def set_waiting(self, on: bool) -> None:
        """Turn on or off that kernels wait for `finish`, and that `take` gives what they carry."""
        self._set_waiting(int(on))

    def take(self) -> NDArray[np.void]:
        """Collectives that the calling thread launched since, as an array of WORK."""
        works = np.empty(MAX_OWN_WORKS, WORK)
        return works[: self._take(works.ctypes.data, MAX_OWN_WORKS)]

    def finish(self, launch: int, start_ns: Sequence[int], end_ns: Sequence[int]) -> None:
        """End a kernel that waits.

        Args:
            launch: its number.
            start_ns: when each of its works began, by their numbers within the launch.
            end_ns: when each ended.

        Raises:
            PluginError: no such kernel waits, or it has more works.
        """
        times = ctypes.c_uint64 * len(start_ns)
        if self._finish(launch, times(*start_ns), times(*end_ns), len(start_ns)) != 0:
            raise PluginError(f"no kernel of the mock GPU waits as launch {launch} with {len(start_ns)} works")


def _is_of(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and (prefix != "cuda" or name[4:5].isupper())


def refuse_beside_a_driver() -> None:
    """Raises UserError where a CUDA driver is in use, unless ZEROTUNE_MOCK_CUDA says force."""
    if os.environ.get(FORCE) == "force":
        return
    found = next((path for path in DRIVER_FILES if os.path.exists(path)), None)
    if found is not None:
        raise UserError(
            f"this machine has a CUDA driver ({found}): the mock CUDA is for machines without one",
            f"{FORCE}=force uses it all the same",
        )
