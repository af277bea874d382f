"""Completes topology files that lack data of GPUs or adapters, with options of the user.

Clouds ship files with the places of PCI devices only. NCCL adds each GPU's capability and NVLinks and each adapter's
speed from the machine that it runs on. An option that contradicts the file is refused.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Final

from ....store.errors import UserError
from ..mock_cuda.machine import (
    GPU_CLASSES,
    ON_A_BASEBOARD,
    SWITCH_CLASS,
    SWITCHED,
    has_speed,
    lacks_links,
    read_topology,
)

_NIC_CLASS: Final = "0x02"
_HIDDEN_SWITCH: Final = "fffffff:ff:ff.0"
"""NCCL's bus id for a switch that a virtual machine does not show."""
_LINKED_SINCE: Final = 60
"""From this compute capability on, until there were switches, GPUs have direct links that differ by machine."""


def completed(path: Path, capability: int | None, nic_gbps: float | None) -> str | None:
    """The completed file's XML; None if nothing was added.

    Args:
        capability: of its GPUs, 90 = 9.0; None: unknown.
        nic_gbps: gigabits per second of each adapter; None: unknown.

    Raises:
        UserError: the file is no topology or contradicts the arguments, or the links of such GPUs are unknown.
    """
    root = read_topology(path)
    pcis = sorted(root.iter("pci"), key=lambda pci: pci.get("busid", "").lower())  # CUDA numbers them in this order
    bare = [pci for pci in pcis if _class(pci).startswith(GPU_CLASSES) and pci.find("gpu") is None]
    gpus = list(root.iter("gpu"))
    stated = sorted({gpu.get("sm", "") for gpu in gpus})
    if capability is not None and gpus and stated != [str(capability)]:
        raise UserError(
            f"{path} has GPUs of capability {', '.join(stated)}, --gpu {capability}", "correct --gpu, or leave it out"
        )
    n_added = 0
    if capability is not None and bare and not gpus:
        for dev, pci in enumerate(bare):
            ElementTree.SubElement(pci, "gpu", dev=str(dev), sm=str(capability), rank=str(dev), gdr="1")
        _link(path, [pci[-1] for pci in bare], capability)
        n_added += len(bare)
    elif capability is not None and lacks_links(root):
        _link(path, gpus, capability)
        n_added += len(gpus)
    if nic_gbps is not None:
        n_added += _speeds(path, root, [pci for pci in pcis if _class(pci).startswith(_NIC_CLASS)], nic_gbps)
    return ElementTree.tostring(root, encoding="unicode") if n_added else None


def _class(pci: ElementTree.Element) -> str:
    return pci.get("class", "").lower()


def _speeds(path: Path, root: ElementTree.Element, nics: list[ElementTree.Element], gbps: float) -> int:
    """Set the speed of adapters that have none in the file; returns how many there were."""
    mbps, nets = str(round(1000 * gbps)), list(root.iter("net"))
    if not nets:
        for dev, pci in enumerate(nics):
            _adapter(pci, dev, mbps)
        if not nics:
            raise UserError(f"{path} has no network adapter for --nic-gbps {gbps:g}", "leave it out")
        return len(nics)
    silent = [net for net in nets if not has_speed(net)]
    for net in silent:
        net.set("speed", mbps)
    stated = {net.get("speed", "") for net in nets}
    if not silent and stated != {mbps}:
        speeds = ", ".join(sorted(stated))
        problem = f"{path} has adapters of {speeds} Mb/s, --nic-gbps {gbps:g}"
        raise UserError(problem, "leave it out, or correct the file")
    return len(silent)


def _link(path: Path, gpus: list[ElementTree.Element], capability: int) -> None:
    """Add the links between GPUs of a baseboard and its switches."""
    if capability not in SWITCHED and not _LINKED_SINCE <= capability < min(SWITCHED):
        return
    if capability not in SWITCHED or len(gpus) != ON_A_BASEBOARD:
        raise UserError(
            f"{path}: how {len(gpus)} GPUs of compute capability {capability / 10} are linked differs by machine",
            "give the file that NCCL_TOPO_DUMP_FILE writes there beside it",
        )
    for gpu in gpus:
        ElementTree.SubElement(
            gpu, "nvlink", target=_HIDDEN_SWITCH, count=str(sum(SWITCHED[capability])), tclass=SWITCH_CLASS
        )


def _adapter(pci: ElementTree.Element, dev: int, mbps: str) -> None:
    nic = pci.find("nic")
    ElementTree.SubElement(
        ElementTree.SubElement(pci, "nic") if nic is None else nic,
        "net",
        name=f"nic{dev}",
        dev=str(dev),
        speed=mbps,
        port="1",
        latency="0",
        guid=hex(dev + 1),
        maxconn="131072",
        gdr="1",
    )
