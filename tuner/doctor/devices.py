"""GPUs and RDMA adapters, from Linux's files below /sys; the lists are empty if there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from ...agent.machine.adapters import is_chosen
from ...store.foreign.regular_file import begin_of

MAX_BYTES: Final = 1 << 16
"""Most bytes read of a file."""
NVIDIA: Final = "0x10de"
AMAZON: Final = "0x1d0f"
DISPLAY, BRIDGE = ("0x0300", "0x0302"), "0x0604"
"""Beginnings of a PCI device's class."""


class Device(msgspec.Struct, frozen=True):
    """A GPU, by its PCI address, or an RDMA adapter, by its name, such as mlx5_0."""

    name: str
    path: Path
    """Its folder, below the folders of its PCI bridges; a virtual adapter has no bridge."""
    numa_node: str
    """Its NUMA node; empty: unknown."""


def text(path: Path) -> str:
    """A file's text; empty: it does not exist, or cannot be read."""
    try:
        return begin_of(path, MAX_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def gpus(root: Path) -> list[Device]:
    """NVIDIA's GPUs."""
    found = sorted((root / "sys/bus/pci/devices").glob("*"))
    return [
        _device(one.name, one)
        for one in found
        if text(one / "vendor") == NVIDIA and text(one / "class").startswith(DISPLAY)
    ]


def adapters(root: Path) -> list[Device]:
    """RDMA adapters, including EFA, whether or not NCCL may use them."""
    return [_device(one.name, one / "device") for one in sorted((root / "sys/class/infiniband").glob("*"))]


def is_efa(adapter: Device) -> bool:
    """Whether it is an Elastic Fabric Adapter, which NCCL needs a plugin for."""
    return adapter.name.startswith("efa") or text(adapter.path / "vendor") == AMAZON


def out_of_use(root: Path, adapter: Device, variables: Mapping[str, str]) -> str:
    """Why NCCL does not use an adapter; empty: it may use it."""
    ports = sorted((root / "sys/class/infiniband" / adapter.name / "ports").glob("*"))
    active = [one for one in ports if text(one / "state").endswith("ACTIVE")]
    if not active:
        return "no port of it is active"
    choice = variables.get("NCCL_IB_HCA", "")
    return "" if any(is_chosen(f"{adapter.name}:{one.name}", choice) for one in active) else "NCCL_IB_HCA leaves it out"


def bridges(device: Device) -> list[Path]:
    """The PCI bridges above a device, the nearest first; the last is the root port."""
    return [one for one in device.path.parents if text(one / "class").startswith(BRIDGE)]


def distance(one: Device, other: Device) -> int:
    """0: below one root port; 1: on one NUMA node, or unknown; 2: on two."""
    if set(bridges(one)) & set(bridges(other)):
        return 0
    return 2 if one.numa_node and other.numa_node and one.numa_node != other.numa_node else 1


def _device(name: str, folder: Path) -> Device:
    return Device(name, folder.resolve(), text(folder / "numa_node").replace("-1", ""))
