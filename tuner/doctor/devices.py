"""GPUs and RDMA adapters, as Linux tells of them below /sys: a machine without any has empty lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from ...agent.machine.adapters import is_chosen
from ...store.foreign.regular_file import begin_of

MAX_BYTES: Final = 1 << 16
"""That are read of a file."""
NVIDIA: Final = "0x10de"
AMAZON: Final = "0x1d0f"
DISPLAY, BRIDGE = ("0x0300", "0x0302"), "0x0604"
"""How the class of a PCI device begins."""


class Device(msgspec.Struct, frozen=True):
    """A GPU, by its PCI address, or an RDMA adapter, by its name, such as mlx5_0."""

    name: str
    path: Path
    """Below the folders of all PCI bridges that it hangs on; a virtual adapter has none."""
    numa_node: str
    """Empty: unknown."""


def text(path: Path) -> str:
    """What a file says; empty: it is not there, or may not be read."""
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
    """RDMA adapters, EFA's among them, whether or not NCCL may use them."""
    return [_device(one.name, one / "device") for one in sorted((root / "sys/class/infiniband").glob("*"))]


def is_efa(adapter: Device) -> bool:
    """Whether it is an Elastic Fabric Adapter, which NCCL itself has no code for."""
    return adapter.name.startswith("efa") or text(adapter.path / "vendor") == AMAZON


def out_of_use(root: Path, adapter: Device, variables: Mapping[str, str]) -> str:
    """Why NCCL leaves an adapter alone; empty: it does not."""
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
    """0: below one root port; 1: on one NUMA node, as far as is known; 2: on two."""
    if set(bridges(one)) & set(bridges(other)):
        return 0
    return 2 if one.numa_node and other.numa_node and one.numa_node != other.numa_node else 1


def _device(name: str, folder: Path) -> Device:
    return Device(name, folder.resolve(), text(folder / "numa_node").replace("-1", ""))
