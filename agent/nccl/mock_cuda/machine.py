"""The described machine of the mock, read from a topology file as NCCL_TOPO_DUMP_FILE writes it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Final

from ....store.errors import UserError, reason
from ....store.foreign.regular_file import read_file

MAX_FILE_BYTES: Final = 4 << 20
"""Limit of a topology file; a dump of an eight-GPU node has some ten thousand bytes."""
MAX_DEVICES: Final = 64
"""MOCK_MAX_DEVICES and MOCK_MAX_NICS of mock_cuda.h."""
_BUS_ID: Final = re.compile(r"(?:0000)?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
"""The domain may have eight digits, as nvidia-smi prints it."""
GPU_CLASSES: Final = ("0x0302", "0x0300")
"""PCI classes of GPUs; files of clouds have nothing else of GPUs, and NCCL reads the rest from the machine."""
SWITCH_CLASS: Final = "0x068000"
"""PCI class of an NVSwitch, as an nvlink's target."""
SWITCHED: Final = {80: (2,) * 6, 90: (5, 4, 5, 4), 100: (9, 9), 103: (9, 9)}
"""NVLinks to each NVLink switch of an eight-GPU baseboard, by compute capability."""
ON_A_BASEBOARD: Final = 8
"""GPUs of a baseboard."""
_DEFAULT_MBPS: Final = 10_000
"""NCCL's value for an adapter of unknown speed."""
_MULTIPROCESSORS: Final = {70: 80, 75: 72, 80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 170}
"""Multiprocessors of the largest GPU by compute capability; NCCL limits channels by them."""
_MEMORY_BYTES: Final = 80 << 30
_XML_VERSION: Final = "1"
_REMEDY: Final = "give a file that NCCL_TOPO_DUMP_FILE wrote"
_DUMP: Final = "give the file that NCCL_TOPO_DUMP_FILE writes there beside it, or a machine of `zerotune hardware`"


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    bus_id: str
    capability: int
    """90 = 9.0."""
    n_nvlinks: int
    behind_switch: bool

    @property
    def n_multiprocessors(self) -> int:
        """Streaming multiprocessors."""
        return _MULTIPROCESSORS.get(self.capability, 108)

    @property
    def memory_bytes(self) -> int:
        """Device memory."""
        return _MEMORY_BYTES


@dataclass(frozen=True)
class Nic:
    """One network adapter's port."""

    name: str
    speed_mbps: int
    port: int
    latency_us: float
    guid: int
    reaches_gpu_memory: bool
    is_speed_assumed: bool = False
    """The file has no speed, and this is NCCL's value then."""
    is_sharp: bool = False
    """Its switches reduce, so that NCCL has CollNet and NVLS across nodes."""


@dataclass(frozen=True)
class Machine:
    """One node."""

    path: Path
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    cpu_is_amd: bool = False

    @property
    def multicast(self) -> bool:
        """Whether NVLink switches multicast, so that NCCL has NVLS: third generation, from Hopper on."""
        return all(gpu.behind_switch and gpu.capability >= 90 for gpu in self.gpus)

    def with_visible(self, visible_devices: str | None) -> Machine:
        """The node with the GPUs in CUDA_VISIBLE_DEVICES, in that order; the mock's NVML shows only these, too.

        As in CUDA, the first invalid number ends the list. None: all GPUs are visible.
        """
        if visible_devices is None:
            return self
        numbers = (text.strip() for text in visible_devices.split(","))
        seen = takewhile(lambda number: number.isdecimal() and int(number) < len(self.gpus), numbers)
        return replace(self, gpus=tuple(self.gpus[int(number)] for number in seen))


def read_topology(path: Path) -> ElementTree.Element:
    """The root of a topology file.

    Raises:
        UserError: the file cannot be read, is too large, or is no topology.
    """
    try:
        text = read_file(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the topology {path} cannot be read: {reason(error)}", _REMEDY) from error
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise UserError(f"{path} declares entities, which no topology does", _REMEDY)
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise UserError(f"{path} is no XML: {error}", _REMEDY) from error
    if root.tag != "system":
        raise UserError(f"{path} is no topology: it begins with <{root.tag}>, not with <system>", _REMEDY)
    if root.get("version", _XML_VERSION) != _XML_VERSION:
        raise UserError(f"{path} has version {root.get('version')!r}, NCCL reads {_XML_VERSION}", _REMEDY)
    return root


def read_machine(path: Path) -> Machine:
    """The machine that a topology file describes.

    Raises:
        UserError: the file is no topology, lacks needed data, or has no GPU or impossible GPUs.
    """
    root = read_topology(path)
    pcis = list(root.iter("pci"))
    gpus = tuple(_gpu(path, pci, gpu) for pci in pcis for gpu in pci.findall("gpu"))
    nics = tuple(_nic(path, net) for net in root.iter("net"))
    if not gpus:
        n_bare = sum(pci.get("class", "").lower().startswith(GPU_CLASSES) for pci in pcis)
        n_others = len(pcis) - n_bare
        what = f"{n_bare} GPUs by their PCI class alone" if n_bare else f"{n_others} PCI devices and no GPU"
        raise UserError(
            f"{path} has {what}: NCCL asks the machine for the GPUs' kind, links and adapters",
            ("say --gpu (`predict`, `advise`), or " if n_bare else "") + _DUMP,
        )
    if len({cpu.get("host_hash") for cpu in root.iter("cpu")} - {None}) > 1:
        raise UserError(f"{path} joins several hosts, and NCCL_TOPO_FILE is of one", "leave one host's <cpu> in it")
    if lacks_links(root):
        raise UserError(
            f"{path} has {len(gpus)} GPUs without links or PCI device: NCCL asks the machine for their NVLinks",
            ("say --gpu (`predict`, `advise`), " if len(gpus) == ON_A_BASEBOARD else "")
            + f"give their PCIe cards a `device` if they have none, or {_DUMP}",
        )
    for what, found in (("GPUs", gpus), ("network adapters", nics)):
        if len(found) > MAX_DEVICES:
            raise UserError(f"{path} has {len(found)} {what}, a node at most {MAX_DEVICES}", _REMEDY)
    if len({gpu.bus_id for gpu in gpus}) < len(gpus):
        raise UserError(f"{path} has two GPUs of one bus id", _REMEDY)
    return Machine(path, gpus, nics, any(cpu.get("vendor") == "AuthenticAMD" for cpu in root.iter("cpu")))


def lacks_links(root: ElementTree.Element) -> bool:
    """Whether all GPUs lack NVLinks that GPUs of their kind have, in a file that is no dump.

    A dump has each GPU's PCI device, and all its links. In other files NCCL adds links from the machine.
    """
    gpus = [(pci, gpu) for pci in root.iter("pci") for gpu in pci.findall("gpu")]
    return len(gpus) > 1 and all(
        gpu.find("nvlink") is None and pci.get("device") is None and gpu.get("sm", "") in map(str, SWITCHED)
        for pci, gpu in gpus
    )


def connect(machine: Machine, name: str, n_nodes: int) -> None:
    """Raise UserError if `n_nodes` nodes cannot be connected, since they have no adapters."""
    if n_nodes > 1 and not machine.nics:
        raise UserError(
            f"{name} has no network adapter, so {n_nodes} nodes cannot be connected",
            "use 1 node; if its file leaves adapters to the machine, say --nic-gbps",
        )


def _gpu(path: Path, pci: ElementTree.Element, gpu: ElementTree.Element) -> Gpu:
    bus_id = pci.get("busid", "").lower()
    found = _BUS_ID.fullmatch(bus_id)
    if found is None:
        raise UserError(f"{path}: a GPU has the bus id {pci.get('busid')!r}", "bus ids look like 0000:0f:00.0")
    links = [link for link in gpu.findall("nvlink") if link.get("target", "").lower() != bus_id]  # without loops
    return Gpu(
        bus_id=found[1],
        capability=_number(path, gpu, "sm", 50, 200),
        n_nvlinks=sum(_number(path, link, "count", 1, 64) for link in links),
        behind_switch=bool(links) and all(link.get("tclass") == SWITCH_CLASS for link in links),
    )


def _nic(path: Path, net: ElementTree.Element) -> Nic:
    name = net.get("name", "")
    if not 0 < len(name.encode()) < 32:
        raise UserError(f"{path}: a network adapter has the name {name!r}", _REMEDY)
    try:
        guid, latency_us = int(net.get("guid", "0"), 16), float(net.get("latency", "0"))
    except ValueError as error:
        raise UserError(f"{path}: adapter {name}: {error}", _REMEDY) from error
    return Nic(
        name=name,
        speed_mbps=_number(path, net, "speed", 1, 10_000_000) if has_speed(net) else _DEFAULT_MBPS,
        port=_number(path, net, "port", 0, 1 << 15, default=1),
        latency_us=latency_us,
        guid=guid % (1 << 64),
        reaches_gpu_memory=net.get("gdr") == "1",
        is_sharp=net.get("coll") == "1",
        is_speed_assumed=not has_speed(net),
    )


def has_speed(net: ElementTree.Element) -> bool:
    """Whether a `<net>` has a speed; -1 and 0 count as none."""
    return net.get("speed", "-1") not in ("-1", "0")


def _number(
    path: Path, element: ElementTree.Element, name: str, lowest: int, highest: int, *, default: int | None = None
) -> int:
    text = element.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit() or not lowest <= int(text) <= highest:
        raise UserError(f"{path}: <{element.tag}> has {name}={text!r}", f"{name} is {lowest} to {highest}")
    return int(text)
