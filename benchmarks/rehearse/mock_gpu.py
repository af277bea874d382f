"""The mock GPU of rehearsals: the mock CUDA, on which streams take their time and collectives move their bytes."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.rehearse.environments import REPOSITORY
from zerotune.agent.nccl.compiled import SharedLibrary
from zerotune.agent.nccl.mock_cuda.mock import MockCuda, Patched, is_of
from zerotune.agent.nccl.mock_cuda.symbols import exported_functions
from zerotune.store.errors import UserError

_INCLUDED: Final = "agent/nccl/mock_cuda/library"
MOCK_GPU: Final = SharedLibrary(
    "the mock GPU",
    "benchmarks/rehearse/mock/libzerotune-mock-gpu.so",
    (f"{_INCLUDED}/*/*.c", "benchmarks/rehearse/mock/*.c", "agent/nccl/plugin/version.c"),
    flags=("-Wl,-soname,libnvidia-ml.so.1", f"-I{REPOSITORY / _INCLUDED}"),
    headers=(f"{_INCLUDED}/**/*.h", "benchmarks/rehearse/mock/*.h", "agent/nccl/plugin/**/*.h"),
    compile_flags="agent/nccl/plugin/compile_flags.txt",
    root=REPOSITORY,
)
Price = Callable[[int, int, int, int, int, int], float]
"""Microseconds of a collective, `mock_price` in streams.h."""
_PRICE: Final = ctypes.CFUNCTYPE(
    ctypes.c_double, ctypes.c_int, ctypes.c_int, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64
)
QUEUE: Final = 1024
"""Kernels that a stream takes before its host waits, as on GPUs; N_AHEAD of streams.c."""
HOST_US: Final = 26.0
"""Microseconds that a GPU waits for a function of the host: a round trip at each replay of a graph.

The authors of torchcomms measured it (github.com/meta-pytorch/torchcomms/pull/1203).
"""


class Graph:
    """The content of a captured stream; freed with the last reference, or by `destroy`."""

    def __init__(self, call: Callable[..., None], stream: int, graph: int) -> None:
        self._call, self._graph, self._stream = call, ctypes.c_void_p(graph), ctypes.c_void_p(stream)
        self.destroy = weakref.finalize(self, _destroy, call, self._stream, self._graph)

    def launch(self) -> None:
        """Raises PluginError."""
        self._call("cudaGraphLaunch", self._graph, self._stream)


def _destroy(call: Callable[..., None], stream: ctypes.c_void_p, graph: ctypes.c_void_p) -> None:
    call("cudaGraphDestroy", graph)
    call("cudaStreamDestroy", stream)


class MockGpu(MockCuda):
    """The mock in this process; make one before libnccl is opened.

    Args:
        in_front: of NCCL's API and the CUDA driver, for all libraries that are loaded later.

    Raises:
        PluginError: it cannot be built or loaded.
        UserError: a CUDA driver is in use on this machine.
    """

    def __init__(self, *, in_front: bool = False) -> None:
        super().__init__(MOCK_GPU, os.RTLD_GLOBAL if in_front else ctypes.DEFAULT_MODE)
        self._n_freed_uses = self.bind("n_freed_uses", ctypes.c_uint64)
        self._set_queue = self.bind("set_queue", None, ctypes.c_uint32)
        self._set_prices = self.bind("set_prices", None, _PRICE, *[ctypes.c_double] * 4)
        self._set_nccl = self.bind("set_nccl", None, ctypes.c_void_p)
        self._set_node = self.bind("set_node", None, ctypes.c_int)
        self._set_most_bytes = self.bind("set_most_bytes", None, ctypes.c_uint64)
        self._price: Any = None  # as long as the library may call it

    def replace_exports(self, path: Path, library: ctypes.CDLL, prefix: str, kind: Patched) -> int:
        """Put the mock in place of a loaded library's exports; returns the number of functions.

        Args:
            prefix: of the functions' names.

        Raises:
            UserError: it has none.
            PluginError: its code cannot be replaced.
        """
        found = [each for each in exported_functions(path) if is_of(each.name, prefix)]
        if not found:
            raise UserError(f"{path} has no functions {prefix}*", "install NVIDIA's wheel again")
        base = (ctypes.cast(library[found[0].name], ctypes.c_void_p).value or 0) - found[0].address
        self.replace(path, base, found, kind)
        return len(found)

    def stand_in_front_of(self, nccl: ctypes.CDLL) -> None:
        """From now on torch's collectives pass through the mock."""
        self._set_nccl(nccl._handle)

    def set_node(self, node: int) -> None:
        self._set_node(node)

    def set_most_bytes(self, n_bytes: int) -> None:
        """From now on no larger buffers (of each rank) are copied."""
        self._set_most_bytes(n_bytes)

    def set_prices(
        self, price: Price, noise: float, kernel_us: float, flops_per_ns: float, host_us: float = HOST_US
    ) -> None:
        """Let kernels run in their streams, for their time.

        Args:
            price: of a collective, by ranks, nodes, device function, channels, count and bytes per element.
            noise: standard deviation of a collective's time, relative.
            kernel_us: of a kernel that is no collective.
            flops_per_ns: rate of matrix products.
            host_us: time that the GPU waits for a function of the host, besides the function's own time.
        """
        self._price = _PRICE(price)
        self._set_prices(self._price, noise, kernel_us, flops_per_ns, host_us)

    def free(self, address: int) -> None:
        """Free device memory once all running work is over; raises PluginError if there is none."""
        self.call("cudaFree", ctypes.c_void_p(address))

    def n_freed_uses(self) -> int:
        """Kernels and copies that ran after their memory was freed; standard error names each kind."""
        return int(self._n_freed_uses())

    def begin_capture(self) -> int:
        """A new stream of the calling thread's GPU, which captures its work for `end_capture`."""
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreate", ctypes.byref(stream))
        self.call("cudaStreamBeginCapture", stream, 0)
        return stream.value or 0

    def end_capture(self, stream: int) -> Graph:
        """Raises PluginError if the stream does not capture."""
        graph = ctypes.c_void_p()
        self.call("cudaStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        return Graph(self.call, stream, graph.value or 0)

    def set_queue(self, n_kernels: int) -> None:
        """The number of kernels that a stream takes before its host waits, at most QUEUE."""
        self._set_queue(n_kernels)
