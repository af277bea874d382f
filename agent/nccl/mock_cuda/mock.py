"""The mock's interface for Python: attaches it to a libnccl, describes the machine, returns launched collectives."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....store.errors import PluginError, UserError
from ..compiled import MOCK_CUDA, SharedLibrary
from .layouts import LayoutFields, layout_of
from .machine import MAX_DEVICES, Machine
from .symbols import Symbol, functions

CUDA_VERSION: Final = 12090
"""CUDA 12.9, which is new enough for every release from 2.21 on."""
RING_WORKS: Final = 65536
"""As in launch.c: far more collectives than all ranks of a node launch between two drains."""
WORK: Final = np.dtype(
    [("launch", "<u8"), ("communicator", "<u8"), ("stream", "<u8"), ("count", "<u8"), ("channel_mask", "<u8"),
     ("function_id", "<u4"), ("device", "<u4"), ("number", "<u4"), ("chunk_grains", "<u4")]
)  # fmt: skip
"""One collective of one launch: `mock_work` in mock_cuda.h."""
FORCE: Final = "ZEROTUNE_MOCK_CUDA"
"""Variable that allows the mock on a machine with a CUDA driver, with the value `force`."""
DRIVER_FILES: Final = ("/dev/nvidiactl", "/dev/dxg")
"""Devices of NVIDIA's driver on Linux, and on WSL."""


class Patched(IntEnum):
    """Kinds of patched libraries; as in mock_cuda.h."""

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


class MockCuda:
    """The mock in this process. It also replaces NVML, so it must be made before libnccl is opened.

    Raises:
        PluginError: the library cannot be built or loaded.
        UserError: a CUDA driver is in use on this machine.
    """

    def __init__(self, built: SharedLibrary = MOCK_CUDA, mode: int = ctypes.DEFAULT_MODE) -> None:
        refuse_beside_a_driver()
        path = built.build()
        try:
            self._library = ctypes.CDLL(str(path), mode)
        except OSError as error:
            raise PluginError(f"the mock CUDA cannot be loaded: {error}") from error
        self.path: Final = path
        pointer, count = ctypes.c_void_p, ctypes.c_size_t
        self._patch = self.bind("patch", ctypes.c_int, pointer, pointer, pointer, count, ctypes.c_int)
        self._redirect_calls = self.bind("redirect_calls", ctypes.c_int, pointer)
        self._set_machine = self.bind("set_machine", None, pointer)
        self._set_layout = self.bind("set_layout", None, pointer)
        self._set_device = self.bind("set_device", None, ctypes.c_int)
        self._malloc = self.bind("malloc", ctypes.c_int, ctypes.POINTER(pointer), count)
        self._set_duration_us = self.bind("set_duration_us", None, ctypes.c_double)
        self._set_timer_step_ns = self.bind("set_timer_step_ns", None, ctypes.c_uint64)
        self._set_away_ms = self.bind("set_away_ms", None, ctypes.c_double)
        self._set_recording = self.bind("set_recording", None, ctypes.c_int)
        self._drain = self.bind("drain", count, pointer, count)
        self._drained = np.empty(RING_WORKS, WORK)
        self._function = self.bind("function", pointer, ctypes.c_char_p)

    def bind(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of the mock by its name without `mock_cuda_`."""
        function = getattr(self._library, f"mock_cuda_{name}")
        function.restype = result
        function.argtypes = arguments
        return function

    def set_machine(self, machine: Machine, node: str, cuda_version: int = CUDA_VERSION) -> None:
        """Set the machine whose GPUs and network adapters this process sees, also in NCCL's variables.

        The machine's file must not be moved. By the node's name NCCL recognises ranks of one node. `cuda_version` 12090
        is 12.9.
        """
        os.environ.update(
            NCCL_TOPO_FILE=str(machine.path),
            NCCL_HOSTID=node,
            NCCL_SOCKET_IFNAME="lo",
            NCCL_NET_PLUGIN=str(self.path) if machine.nics else "none",
            # Without it, 2.28 and newer unload the plugin with the last communicator, and 2.29 cannot load it again.
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
        """Replace the CUDA runtime in a loaded libnccl; returns the library's address.

        Args:
            counts_unwatched: also count works that no profiler follows, as real kernels do. NCCL's host from 2.31 on
                does not, so that times are shifted.

        Raises:
            UserError: the file is no libnccl, or its release is not known.
            PluginError: the library's code cannot be replaced.
        """
        layout = layout_of(version)
        if counts_unwatched:
            layout = layout._replace(counts_watched_only=0)
        found = functions(path)
        origin = next((each.address for each in found if each.name == "ncclGetVersion"), None)
        cuda = [each for each in found if is_of(each.name, "cuda")]
        if origin is None or not cuda:
            raise UserError(f"{path} does not hold NCCL and CUDA's runtime", "take the library of NVIDIA's wheel")
        base = (ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value or 0) - origin
        self.replace(path, base, cuda, Patched.runtime_of_nccl)
        self._redirect_calls(base + cuda[0].address)  # if that fails, NCCL is slower and may leave files behind
        self._set_layout(ctypes.byref(LayoutFields(*layout)))
        return base

    def replace(self, path: Path, base: int, found: Sequence[Symbol], kind: Patched) -> None:
        """Replace functions of the library loaded at address `base`; PluginError if its code cannot be replaced."""
        names = (ctypes.c_char_p * len(found))(*(each.name.encode() for each in found))
        addresses = (ctypes.c_void_p * len(found))(*(base + each.address for each in found))
        sizes = (ctypes.c_uint64 * len(found))(*(each.n_bytes for each in found))
        if self._patch(names, addresses, sizes, len(found), int(kind)) != 0:
            raise PluginError(f"the mock CUDA cannot be put into {path}: its code cannot be written to")

    def set_device(self, device: int) -> None:
        """Set the GPU of the calling thread."""
        self._set_device(device)

    def malloc(self, n_bytes: int) -> int:
        """Address of new device memory of the calling thread's GPU; PluginError if it has too little."""
        pointer = ctypes.c_void_p()
        if self._malloc(ctypes.byref(pointer), n_bytes) != 0:
            raise PluginError(f"the mock GPU has no room for {n_bytes} bytes")
        return pointer.value or 0

    def used_bytes(self, device: int) -> int:
        """Memory in use of a GPU."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.set_device(device)
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the CUDA runtime; PluginError if it fails."""
        address = self._function(name.encode())
        if address is None or ctypes.CFUNCTYPE(ctypes.c_int)(address)(*arguments) != 0:
            raise PluginError(f"{name} failed on the mock GPU")

    def set_duration_us(self, duration_us: float) -> None:
        """Set the duration of kernels; below 0: they never end."""
        self._set_duration_us(duration_us)

    def set_timer_step_ns(self, step_ns: int) -> None:
        """Set the resolution of the GPU's timer, which is 1000 on some machines."""
        self._set_timer_step_ns(step_ns)

    def set_away_ms(self, away_ms: float) -> None:
        """Set how long NCCL's threads are descheduled whenever they find nothing to do."""
        self._set_away_ms(away_ms)

    def set_recording(self, on: bool) -> None:
        """Turn the recording of launches for `drain` on or off."""
        self._set_recording(int(on))

    def drain(self) -> NDArray[np.void]:
        """Collectives launched since the last call, the oldest first, as an array of WORK."""
        n_works = self._drain(self._drained.ctypes.data, RING_WORKS)
        return self._drained[:n_works].copy()


def is_of(name: str, prefix: str) -> bool:
    """Whether a function belongs to the library whose functions begin with `prefix`."""
    return name.startswith(prefix) and (prefix != "cuda" or name[4:5].isupper())


def refuse_beside_a_driver() -> None:
    """Raise UserError if a CUDA driver is in use, unless ZEROTUNE_MOCK_CUDA=force."""
    if os.environ.get(FORCE) == "force":
        return
    found = next((path for path in DRIVER_FILES if os.path.exists(path)), None)
    if found is not None:
        raise UserError(
            f"this machine has a CUDA driver ({found}): the mock CUDA is for machines without one",
            f"{FORCE}=force uses it all the same",
        )
