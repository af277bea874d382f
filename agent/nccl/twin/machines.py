"""Described machines: topology files for NCCL, each made from a few facts of the maker's datasheet.

Buses and PCIe switches are laid out regularly. Real machines have other bus ids, which NCCL uses only to distinguish
devices. The file that NCCL_TOPO_DUMP_FILE writes on a machine is always better.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import quoteattr

from ....store.errors import UserError
from ..mock_cuda.machine import ON_A_BASEBOARD, SWITCHED, read_machine

_INTEL: Final = 'arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"'
_AMD: Final = 'arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="17"'
_BRIDGE: Final = 'class="0x060400" vendor="0x1000" device="0xc030" subsystem_vendor="0x1000" subsystem_device="0x0100"'
_GPU: Final = 'class="0x030200" vendor="0x10de" device="0x2330" subsystem_vendor="0x10de" subsystem_device="0x16c1"'
_NIC: Final = 'class="0x020700" vendor="0x15b3" device="0x1021" subsystem_vendor="0x15b3" subsystem_device="0x0041"'
_N_CPUS: Final = 2


@dataclass(frozen=True)
class DescribedMachine:
    """One node, its GPUs spread evenly over two CPUs, each with its share of the network adapters beside it."""

    title: str
    capability: int
    """90 = 9.0."""
    n_gpus: int
    nvlinks: tuple[int, ...]
    """Number of NVLinks of a GPU to each NVLink switch."""
    pcie_gts: str
    """Transfer rate of a PCIe lane: 16.0 (4th generation), 32.0 (5th), 64.0 (6th)."""
    n_nics: int
    nic_gbps: int
    """Gigabits per second of one adapter; NCCL's cost is the same for Ethernet, RoCE and InfiniBand."""
    reaches_gpu_memory: bool
    """Whether it has GPUDirect RDMA."""
    gpus_per_switch: int = 1
    """GPUs that share a PCIe switch."""
    amd: bool = False
    sharp: bool = False
    """Whether InfiniBand switches reduce: with NCCL_COLLNET_ENABLE=1 NCCL has CollNet, and NVLS across nodes."""

    def topology(self) -> str:
        """The machine as a file for NCCL_TOPO_FILE."""
        lines = ['<system version="1">']
        for cpu in range(_N_CPUS):
            lines.append(f'  <cpu numaid="{cpu}" affinity="ffffffff" {_AMD if self.amd else _INTEL}>')
            gpus = range(cpu * self.n_gpus // _N_CPUS, (cpu + 1) * self.n_gpus // _N_CPUS)
            for first in range(gpus.start, gpus.stop, self.gpus_per_switch):
                lines += self._switch(range(first, min(first + self.gpus_per_switch, gpus.stop)))
            lines.append("  </cpu>")
        return "\n".join([*lines, "</system>", ""])

    def _switch(self, gpus: range) -> list[str]:
        link = f'link_speed="{self.pcie_gts} GT/s PCIe" link_width="16"'
        bus = 0x10 + 8 * gpus.start
        lines = [f'    <pci busid="0000:{bus:02x}:00.0" {_BRIDGE} {link}>']
        for place, gpu in enumerate(gpus):
            lines.append(f'      <pci busid="0000:{bus + 1 + place:02x}:00.0" {_GPU} {link}>')
            lines.append(f'        <gpu dev="{gpu}" sm="{self.capability}" rank="{gpu}" gdr="1">')
            lines += [
                f'          <nvlink target="0000:{5 + switch:02x}:00.0" count="{count}" tclass="0x068000"/>'
                for switch, count in enumerate(self.nvlinks)
            ]
            lines += ["        </gpu>", "      </pci>"]
        nics = range(gpus.start * self.n_nics // self.n_gpus, gpus.stop * self.n_nics // self.n_gpus)
        for place, nic in enumerate(nics):
            name = quoteattr(f"mlx5_{nic}" if self.reaches_gpu_memory else f"eth{nic}")
            lines += [
                f'      <pci busid="0000:{bus + 5 + place:02x}:00.0" {_NIC} {link}>',
                f'        <nic><net name={name} dev="{nic}" speed="{1000 * self.nic_gbps}" port="1" latency="0" '
                f'guid="0x{nic + 1:x}" maxconn="131072" gdr="{int(self.reaches_gpu_memory)}" '
                f'coll="{int(self.sharp)}"/></nic>',
                "      </pci>",
            ]
        return [*lines, "    </pci>"]


def _baseboard(
    title: str, capability: int, n_nics: int, nic_gbps: int, *, amd: bool = False, sharp: bool = False
) -> DescribedMachine:
    """Eight GPUs behind NVLink switches."""
    return DescribedMachine(
        title=title,
        capability=capability,
        n_gpus=ON_A_BASEBOARD,
        nvlinks=SWITCHED[capability],
        pcie_gts="16.0" if capability < 90 else "32.0",
        n_nics=n_nics,
        nic_gbps=nic_gbps,
        reaches_gpu_memory=True,
        gpus_per_switch=2 if capability < 90 else 1,
        amd=amd,
        sharp=sharp,
    )


def _on_pcie(title: str, n_gpus: int, n_nics: int, nic_gbps: int, *, reaches_gpu_memory: bool) -> DescribedMachine:
    """GPUs of the Ada generation without NVLink."""
    return DescribedMachine(
        title=title,
        capability=89,
        n_gpus=n_gpus,
        nvlinks=(),
        pcie_gts="16.0",
        n_nics=n_nics,
        nic_gbps=nic_gbps,
        reaches_gpu_memory=reaches_gpu_memory,
        gpus_per_switch=n_gpus // _N_CPUS,
        amd=True,
    )


MACHINES: Final = {
    "dgx_a100": _baseboard("NVIDIA DGX A100: eight HDR InfiniBand adapters", 80, 8, 200, amd=True),
    "dgx_h100": _baseboard("NVIDIA DGX H100: eight NDR InfiniBand adapters", 90, 8, 400),
    "dgx_h100_sharp": _baseboard("the same behind switches with SHARP (NCCL_COLLNET_ENABLE=1)", 90, 8, 400, sharp=True),
    "dgx_b200": _baseboard("NVIDIA DGX B200: eight NDR InfiniBand adapters", 100, 8, 400),
    "p4d": _baseboard("like AWS p4de (p4d: --gpu a100_40gb): eight A100, four 100 Gb/s EFA adapters", 80, 4, 100),
    "p5": _baseboard("like AWS p5.48xlarge: eight H100, 3,200 Gb/s of EFA", 90, 8, 400, amd=True),
    "pcie_l40s": _on_pcie("eight L40S on PCIe, two 200 Gb/s adapters", 8, 2, 200, reaches_gpu_memory=True),
    "ethernet_box": _on_pcie("four GPUs on PCIe, one 25 Gb/s Ethernet adapter", 4, 1, 25, reaches_gpu_memory=False),
}
"""Machines that zerotune ships, by name."""


class Node(NamedTuple):
    """The machine of each node of a fabric."""

    topology: str
    """Content of a file for NCCL_TOPO_FILE."""
    n_gpus: int


def node(machine: str, folder: Path) -> Node:
    """The machine that a fabric file names.

    Raises:
        UserError: `machine` is neither a described machine, nor a topology file (.xml) in `folder`.
    """
    if machine in MACHINES:
        return Node(MACHINES[machine].topology(), MACHINES[machine].n_gpus)
    if not machine.endswith(".xml"):
        raise UserError("it is not described", f"machines: {', '.join(MACHINES)}; or name an .xml file")
    path = folder / machine
    n_gpus = len(read_machine(path).gpus)
    return Node(path.read_text(encoding="utf-8"), n_gpus)
