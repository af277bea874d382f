"""Checks of the path between GPUs and network adapters: finds detours through the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...store.foreign.regular_file import begin_of
from .devices import Device, adapters, bridges, distance, gpus, is_efa, out_of_use, text
from .findings import Finding, Machine, ok, warning

GPUDIRECT_COST: Final = "in recordings of two nodes with A100 on PCIe it took 70 % off the time of calls (median)"
PEER_MEMORY: Final = (
    "sys/module/nvidia_peermem/version",
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
)
"""Modules that NCCL looks for."""
OLDEST_DMA_BUF: Final = (5, 12)
"""Oldest Linux that gives an adapter access to a GPU's memory without an NVIDIA module."""
MAX_CONFIG_BYTES: Final = 4096
EXTENDED: Final = 0x100
"""Offset of the extended capabilities in a device's configuration; only root may read them."""
ACS: Final = 0x000D
REDIRECTS: Final = 0b1100
"""Bits of the control register that redirect requests and completions between peers to the root complex."""


def gpudirect(machine: Machine) -> Finding | None:
    """Whether adapters can read and write GPU memory. EFA and Slingshot have other mechanisms."""
    root, variables = machine.root, machine.nccl_variables()
    used = [one for one in adapters(root) if not is_efa(one) and not out_of_use(root, one, variables)]
    if not gpus(root) or not used:
        return None
    if variables.get("NCCL_NET_GDR_LEVEL", "").upper() in ("LOC", "0"):
        setting = machine.stated("NCCL_NET_GDR_LEVEL")
        return warning("gpudirect", f"{setting} turns GPUDirect RDMA off: {GPUDIRECT_COST}", "unset it")
    if any((root / one).exists() for one in PEER_MEMORY):
        return ok("gpudirect", "nvidia_peermem is loaded")
    driver = text(root / "proc/driver/nvidia/version")
    if not driver:
        return None  # unknown, as in containers that hide it
    release = re.match(r"(\d+)\.(\d+)", text(root / "proc/sys/kernel/osrelease"))
    has_dma_buf = "Open Kernel Module" in driver and release and tuple(map(int, release.groups())) >= OLDEST_DMA_BUF
    if has_dma_buf and variables.get("NCCL_DMABUF_ENABLE") != "0":
        return ok("gpudirect", "by dma-buf")
    found = f"GPUDirect RDMA is off, for there is neither nvidia_peermem nor dma-buf: {GPUDIRECT_COST}"
    remedy = "unset NCCL_DMABUF_ENABLE" if has_dma_buf else "install the driver's open kernel modules"
    return warning("gpudirect", found, f"modprobe nvidia_peermem, or {remedy}")


def acs(machine: Machine) -> Finding | None:
    """Whether PCIe switches send traffic between peers through the root complex (Access Control Services)."""
    peers = _peers(machine)
    controls = {port: _acs_control(port) for port in _switch_ports(peers)}
    if all(control is None for control in controls.values()):
        return None
    if redirecting := sorted(port.name for port, control in controls.items() if (control or 0) & REDIRECTS):
        found = f"PCIe ACS redirects traffic between GPUs and adapters through the host, at {' '.join(redirecting)}"
        return warning("acs", found, "turn ACS off in the BIOS, or with setpci at each boot")
    return ok("acs", "no PCIe switch redirects traffic between GPUs and adapters")


def iommu(machine: Machine) -> Finding | None:
    """Whether an x86 IOMMU translates addresses between GPUs and adapters."""
    root, peers = machine.root, _peers(machine)
    units = [one.name for one in (root / "sys/class/iommu").glob("*") if one.name.startswith(("dmar", "ivhd"))]
    if not peers or not units:
        return None
    types = {text(one.path / "iommu_group/type") for one in peers} - {""}
    words = text(root / "proc/cmdline").split()
    is_asked = bool({"intel_iommu=on", "amd_iommu=on"} & set(words))
    passes = bool({"iommu=pt", "iommu.passthrough=1"} & set(words))
    if any(one.startswith("DMA") for one in types) or (not types and is_asked and not passes):
        found = "the IOMMU translates addresses of GPUs and adapters, which can send their traffic through the host"
        return warning("iommu", found, "boot Linux with iommu=pt, or turn the IOMMU (VT-d, AMD-Vi) off in the BIOS")
    return ok("iommu", "it does not translate what GPUs and adapters send")


def nearest_adapter(machine: Machine) -> Finding | None:
    """Whether each GPU may use its nearest adapter."""
    root, variables = machine.root, machine.nccl_variables()
    far: dict[str, list[str]] = {}
    every = {one: out_of_use(root, one, variables) for one in adapters(root)}
    used = [one for one, why in every.items() if not why]
    if not used or not (all_gpus := gpus(root)):
        return None
    for gpu in all_gpus:
        best = min(used, key=lambda one: distance(gpu, one))
        near = min(every, key=lambda one: distance(gpu, one))
        if distance(gpu, near) < distance(gpu, best):
            far.setdefault(f"{near.name} is nearer than {best.name}, but {every[near]}", []).append(gpu.name)
    if not far:
        return ok("nearest_adapter", "each GPU has the nearest of the adapters that are here")
    found = "; ".join(f"GPU {' '.join(names)}: {why}" for why, names in far.items())
    return warning("nearest_adapter", found, "let NCCL_IB_HCA name it, or connect its port")


def _peers(machine: Machine) -> list[Device]:
    """GPUs and PCI adapters that can be peers; none on a virtual machine, where the host decides."""
    found = gpus(machine.root)
    if not found or re.search(r"^flags\b.*\bhypervisor\b", text(machine.root / "proc/cpuinfo"), re.MULTILINE):
        return []
    found += [one for one in adapters(machine.root) if bridges(one)]
    return found if len(found) > 1 else []


def _switch_ports(peers: list[Device]) -> Iterator[Path]:
    """Bridges between two peers, without the root ports."""
    above = {one.name: bridges(one) for one in peers}
    for name, ports in above.items():
        shared = any(ports and ports[-1] in others for other, others in above.items() if other != name)
        yield from ports[:-1] if shared else ()


def _acs_control(port: Path) -> int | None:
    """The control register of a port's ACS; 0: it has none; None: it cannot be read."""
    try:
        config = begin_of(port / "config", MAX_CONFIG_BYTES)
    except OSError:
        return None
    if len(config) < EXTENDED + 4:
        return None
    at, seen = EXTENDED, set()
    while EXTENDED <= at <= len(config) - 8 and at not in seen:
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACS:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20
    return 0
