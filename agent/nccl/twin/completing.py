"""Topology files that leave GPUs or adapters to the machine, completed by what the user says of it.

Clouds ship files that place PCI devices and say no more. NCCL adds each GPU's capability and NVLinks and each
adapter's speed from the machine that it runs on.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Final

from zerotune.agent.nccl.mock_cuda.machine import (
    GPU_CLASSES,
    ON_A_BASEBOARD,
    SWITCH_CLASS,
    SWITCHED,
    lacks_links,
    read_topology,
)
from zerotune.store.errors import UserError

_NIC_CLASS: Final = "0x02"
_UNSEEN_SWITCH: Final = "fffffff:ff:ff.0"
"""How NCCL names a switch that a virtual machine does not show."""
_LINKED_SINCE: Final = 60
"""Compute capability from which on, until there were switches, GPUs are linked to each other as each machine has it."""


def completed(path: Path, capability: int | None, nic_gbps: float | None) -> str | None:
    """The file with what it leaves to the machine.

    Args:
        path: a topology file.
        capability: of its GPUs, 90 = 9.0; None: it is not said.
        nic_gbps: gigabits per second of each adapter; None: it is not said.

    Returns:
        XML; None if nothing was to be added.

    Raises:
        UserError: it is no topology, or how such GPUs are linked does not follow.
    """
    root = read_topology(path)
    pcis = sorted(root.iter("pci"), key=lambda pci: pci.get("busid", "").lower())  # CUDA numbers them in this order
    bare = [pci for pci in pcis if pci.get("class", "").startswith(GPU_CLASSES) and pci.find("gpu") is None]
    has_gpus = root.find(".//gpu") is not None  # NCCL trims those of the class that nobody uses
    n_added = 0
    if capability is not None and bare and not has_gpus:
        for dev, pci in enumerate(bare):
            ElementTree.SubElement(pci, "gpu", dev=str(dev), sm=str(capability), rank=str(dev), gdr="1")
        _link(path, [pci[-1] for pci in bare], capability)
        n_added += len(bare)
    elif capability is not None and lacks_links(root):
        gpus = list(root.iter("gpu"))
        if stated := sorted({gpu.get("sm", "") for gpu in gpus} - {str(capability)}):
            raise UserError(f"{path} has GPUs of capability {', '.join(stated)}, --gpu {capability}", "mend --gpu")
        _link(path, gpus, capability)
        n_added += len(gpus)
    nics = [pci for pci in pcis if pci.get("class", "").startswith(_NIC_CLASS) and pci.find("nic") is None]
    if nic_gbps is not None and root.find(".//net") is None:
        for dev, pci in enumerate(nics):
            _adapter(pci, dev, nic_gbps)
        n_added += len(nics)
    return ElementTree.tostring(root, encoding="unicode") if n_added else None


def _link(path: Path, gpus: list[ElementTree.Element], capability: int) -> None:
    """Add the links that GPUs of a baseboard have to its switches."""
    if capability not in SWITCHED and not _LINKED_SINCE <= capability < min(SWITCHED):
        return
    if capability not in SWITCHED or len(gpus) != ON_A_BASEBOARD:
        raise UserError(
            f"{path}: how {len(gpus)} GPUs of compute capability {capability / 10} are linked differs by machine",
            "give the file that NCCL_TOPO_DUMP_FILE writes there beside it",
        )
    for gpu in gpus:
        ElementTree.SubElement(
            gpu, "nvlink", target=_UNSEEN_SWITCH, count=str(sum(SWITCHED[capability])), tclass=SWITCH_CLASS
        )


def _adapter(pci: ElementTree.Element, dev: int, gbps: float) -> None:
    ElementTree.SubElement(
        ElementTree.SubElement(pci, "nic"),
        "net",
        name=f"nic{dev}",
        dev=str(dev),
        speed=str(round(1000 * gbps)),
        port="1",
        latency="0",
        guid=hex(dev + 1),
        maxconn="131072",
        gdr="1",
    )
