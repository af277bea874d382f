"""The emulated device's memory, of which NCCL takes some for channels and for connecting algorithms."""

from __future__ import annotations

import threading

from .....store.records import Algorithm, CommunicatorClass
from ...fabric_model import Fabric
from ..errors import DeviceOutOfMemory


class DeviceMemory:
    """One rank's device; `reserve_mb` is the memory that training itself uses."""

    def __init__(self) -> None:
        self.reserve_mb = 0.0
        self.limit_mb: float | None = None
        """Memory of the device, 10^6 bytes; None: the fabric's."""
        self.nccl_mb = 0.0
        """Memory that NCCL uses, 10^6 bytes."""
        self._device_mb = float("inf")
        self._lock = threading.Lock()

    def pressure(self) -> float:
        """Memory in use, 0 to 1."""
        return min(1.0, (self.reserve_mb + self.nccl_mb) / self._device_mb)

    def left_bytes(self) -> int:
        """Memory not in use, at most 10^15 bytes."""
        left_mb = self._device_mb - self.reserve_mb - self.nccl_mb
        return int(1e6 * min(max(0.0, left_mb), 1e9))

    def take(self, wanted_mb: float, purpose: str, device_mb: float) -> None:
        """Reserve memory for NCCL; raises `DeviceOutOfMemory` if too little is left, and reserves nothing then.

        `purpose` is for the message. `device_mb` is the memory of the fabric's devices, which `limit_mb` overrides.
        """
        with self._lock:
            if self.limit_mb is not None:
                device_mb = self.limit_mb
            self._device_mb = device_mb
            used_mb = self.reserve_mb + self.nccl_mb
            if used_mb + wanted_mb > device_mb:
                raise DeviceOutOfMemory(
                    f"emulated device out of memory: {purpose} needs {wanted_mb:.0f} MB, "
                    f"{device_mb - used_mb:.0f} of {device_mb:.0f} MB are free"
                )
            self.nccl_mb += wanted_mb

    def free(self, freed_mb: float) -> None:
        """Free memory of a destroyed communicator."""
        with self._lock:
            self.nccl_mb = max(0.0, self.nccl_mb - freed_mb)


_device = DeviceMemory()


def device() -> DeviceMemory:
    """This process's emulated device."""
    return _device


def memory_pressure() -> float:
    """Emulated device memory in use, 0 to 1."""
    return _device.pressure()


class CommunicatorMemory:
    """One communicator's connections; an algorithm is connected at its first use."""

    def __init__(self, fabric: Fabric, communicator: CommunicatorClass, n_channels: int) -> None:
        self._fabric = fabric
        self._communicator = communicator
        self._n_channels = n_channels
        self._connected: dict[Algorithm, int] = {}
        self._taken_mb = 0.0

    def connect(self, algorithm: Algorithm | None, n_channels: int) -> None:
        """Make sure that `algorithm` can run with `n_channels`; raises DeviceOutOfMemory."""
        if algorithm is None:
            return
        if self._fabric.memory.connects == "all_channels":
            n_channels = max(n_channels, self._n_channels)
        if self._connected.get(algorithm, 0) >= n_channels:
            return
        wanted = {**self._connected, algorithm: n_channels}
        wanted_mb = self._fabric.memory_mb(self._communicator, wanted) - self._taken_mb
        purpose = f"connecting {algorithm.name} with {n_channels} channels"
        _device.take(wanted_mb, purpose, self._fabric.memory.device_mb)
        self._taken_mb += wanted_mb
        self._connected = wanted

    def release(self) -> None:
        """Free the connections of a destroyed communicator."""
        _device.free(self._taken_mb)
        self._taken_mb = 0.0
