"""What `zerotune doctor` says of GPUs, adapters and NCCL's variables, on machines made up below a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zerotune.tuner.doctor import examination, left_over, nccl, network, peer_to_peer
from zerotune.tuner.doctor.findings import Finding, Machine, Status
from zerotune.tuner.doctor.probing import Probed

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1"
ON_MACHINE = ("interfaces", "nccl_files", "logging", "network", "gpudirect", "acs", "iommu", "nearest_adapter")


class MadeUp:
    """A machine: two PCIe switches, one to a NUMA node, each with a GPU and an adapter."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.libraries = root, {"libibverbs.so.1"}
        monkeypatch.setattr(network, "probe", self._probe)

    def _probe(self, library: str, *_: str) -> Probed:
        return Probed(path=f"/lib/{library}") if library in self.libraries else Probed(error="no such file")

    def machine(self, **environment: str) -> Machine:
        return Machine("ipc://x", self.root / "s.db", None, {"HOME": str(self.root)} | environment, self.root)

    def file(self, path: str, content: str | bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(content if isinstance(content, bytes) else content.encode())

    def pci(self, path: str, device_class: str, vendor: str = "0x8086", numa_node: int = 0) -> Path:
        folder = f"sys/devices/{path}"
        for name, content in (("class", device_class), ("vendor", vendor), ("numa_node", str(numa_node))):
            self.file(f"{folder}/{name}", content + "\n")
        link = self.root / "sys/bus/pci/devices" / Path(path).name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / folder)
        return self.root / folder

    def adapter(self, name: str, device: Path, state: str = "4: ACTIVE") -> None:
        self.file(f"sys/class/infiniband/{name}/ports/1/state", state)
        (self.root / f"sys/class/infiniband/{name}/device").symlink_to(device)

    def switches(self) -> None:
        for at in (0, 1):
            root_port = f"pci{at}/0{at}:01.0"
            for path in (root_port, f"{root_port}/up{at}", *(f"{root_port}/up{at}/{one}{at}" for one in ("p", "q"))):
                self.pci(path, "0x060400", numa_node=at)
            self.pci(f"{root_port}/up{at}/p{at}/gpu{at}", "0x030200", "0x10de", at)
            self.adapter(f"mlx5_{at}", self.pci(f"{root_port}/up{at}/q{at}/nic{at}", "0x020700", "0x15b3", at))


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    return MadeUp(tmp_path, monkeypatch)


@pytest.fixture
def node(made_up: MadeUp) -> MadeUp:
    made_up.switches()
    return made_up


def status(finding: Finding | None) -> Status | None:
    return None if finding is None else finding.status


def test_absent_hardware_is_not_mentioned(made_up: MadeUp) -> None:
    for code in ON_MACHINE:
        assert examination.CHECKS[code](made_up.machine()) is None, code
    made_up.pci("pci0/nic", "0x020700", "0x15b3")
    made_up.adapter("mlx5_0", made_up.root / "sys/devices/pci0/nic")  # as on a node that only logs users in
    for code in ON_MACHINE:
        assert examination.CHECKS[code](made_up.machine(NCCL_IB_DISABLE="1")) is None, code


@pytest.mark.parametrize(
    ("files", "environment", "expected"),
    [
        ({}, {}, None),
        ({"sys/module/nvidia_peermem/version": "570.1"}, {}, Status.ok),
        ({"sys/module/nvidia_peermem/version": "570.1"}, {"NCCL_NET_GDR_LEVEL": "LOC"}, Status.warning),
        ({"proc/driver/nvidia/version": "NVIDIA UNIX x86_64 Kernel Module  570.1"}, {}, Status.warning),
        ({"proc/driver/nvidia/version": OPEN_DRIVER, "proc/sys/kernel/osrelease": "5.4.0-1"}, {}, Status.warning),
        ({"proc/driver/nvidia/version": OPEN_DRIVER, "proc/sys/kernel/osrelease": "6.8.0-1"}, {}, Status.ok),
        (
            {"proc/driver/nvidia/version": OPEN_DRIVER, "proc/sys/kernel/osrelease": "6.8.0"},
            {"NCCL_DMABUF_ENABLE": "0"},
            Status.warning,
        ),
        ({"sys/module/nvidia_peermem/version": "570.1", ".nccl.conf": "NCCL_NET_GDR_LEVEL=0\n"}, {}, Status.warning),
    ],
)
def test_gpudirect(files, environment, expected, node: MadeUp) -> None:
    for path, content in files.items():
        node.file(path, content)
    found = peer_to_peer.gpudirect(node.machine(**environment))
    assert status(found) is expected
    assert expected is not Status.warning or "70 %" in found.found


def config(control: int, begin: bytes = b"\0" * 256) -> bytes:
    """A device's configuration, where another capability comes before ACS."""
    other = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little").ljust(0x48, b"\0")
    acs = (0x000D | 1 << 16).to_bytes(4, "little") + b"\0\0" + control.to_bytes(2, "little")
    return begin + other + acs + b"\0" * 8


def test_acs(node: MadeUp) -> None:
    assert peer_to_peer.acs(node.machine()) is None, "who is not root cannot see it"
    port, root_port = "sys/devices/pci0/00:01.0/up0/p0/config", "sys/devices/pci0/00:01.0/config"
    node.file(port, config(0)[:64])
    assert peer_to_peer.acs(node.machine()) is None
    node.file(port, config(0b1))
    node.file(root_port, config(0b11101))
    assert status(peer_to_peer.acs(node.machine())) is Status.ok, "two below one switch never come to the root port"
    node.file(port, config(0b11101))
    found = peer_to_peer.acs(node.machine())
    assert (found.status, "p0" in found.found) == (Status.warning, True)
    for broken in (config(0)[:0x140], b"\xff" * 4096, b"\0" * 4096):
        node.file(port, broken)
        assert peer_to_peer.acs(node.machine()) is not None
    node.file(port, config(0b11101))
    node.file("proc/cpuinfo", "processor : 0\nflags : fpu hypervisor lahf_lm\n")
    assert peer_to_peer.acs(node.machine()) is None, "on a virtual machine the host decides"


@pytest.mark.parametrize(
    ("group_type", "command_line", "unit", "expected"),
    [
        ("DMA-FQ", "", "dmar0", Status.warning),
        ("identity", "intel_iommu=on", "dmar0", Status.ok),
        ("", "ro intel_iommu=on quiet", "dmar0", Status.warning),
        ("", "amd_iommu=on iommu=pt", "ivhd0", Status.ok),
        ("DMA", "", "smmu3.0x1", None),
        ("DMA", "intel_iommu=on", "", None),
    ],
)
def test_iommu(group_type, command_line, unit, expected, node: MadeUp) -> None:
    node.file("proc/cmdline", command_line)
    if group_type:
        node.file("sys/devices/pci0/00:01.0/up0/p0/gpu0/iommu_group/type", group_type)
    if unit:
        (node.root / "sys/class/iommu" / unit).mkdir(parents=True)
    assert status(peer_to_peer.iommu(node.machine())) is expected


def test_the_nearest_adapter(node: MadeUp) -> None:
    assert status(peer_to_peer.nearest_adapter(node.machine())) is Status.ok
    found = peer_to_peer.nearest_adapter(node.machine(NCCL_IB_HCA="=mlx5_1"))
    assert found.found == "GPU gpu0: mlx5_0 is nearer than mlx5_1, but NCCL_IB_HCA leaves it out"
    node.file("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    found = peer_to_peer.nearest_adapter(node.machine())
    assert (found.status, "GPU gpu1: mlx5_1 is nearer" in found.found) == (Status.warning, True)
    node.file("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert peer_to_peer.nearest_adapter(node.machine()) is None


@pytest.mark.parametrize(
    ("environment", "libraries", "expected", "words"),
    [
        ({}, {"libibverbs.so"}, Status.ok, "mlx5_0 mlx5_1"),
        ({}, set(), Status.warning, "libibverbs cannot be loaded"),
        ({"NCCL_NET": "Socket"}, {"libibverbs.so"}, Status.warning, "NCCL_NET=Socket"),
        ({"NCCL_IB_DISABLE": "1"}, {"libibverbs.so"}, Status.warning, "NCCL_IB_DISABLE=1"),
        ({"NCCL_IB_HCA": "mlx4"}, {"libibverbs.so"}, Status.warning, "NCCL_IB_HCA=mlx4"),
        ({"NCCL_IB_HCA": "mlx4", "NCCL_NET": "IB"}, {"libibverbs.so"}, Status.problem, "NCCL_NET=IB"),
    ],
)
def test_infiniband(environment, libraries, expected, words, node: MadeUp) -> None:
    node.libraries = libraries
    found = network.network(node.machine(**environment))
    assert (found.status, words in found.found) == (expected, True), found


@pytest.mark.parametrize("kind", ["efa", "slingshot"])
def test_networks_that_need_a_plugin(kind, made_up: MadeUp) -> None:
    made_up.pci("pci0/gpu0", "0x030200", "0x10de")
    if kind == "efa":
        made_up.adapter("rdmap0", made_up.pci("pci0/nic0", "0x020000", "0x1d0f"))
    else:
        (made_up.root / "sys/class/cxi/cxi0").mkdir(parents=True)
    found = network.network(made_up.machine())
    assert (found.status, "so NCCL uses TCP" in found.found) == (Status.warning, True)
    assert "aws-ofi-nccl" in found.remedy
    assert peer_to_peer.gpudirect(made_up.machine()) is None, "they have ways of their own"
    made_up.libraries = {"libnccl-net-ofi.so"}
    assert network.network(made_up.machine()).remedy == "set NCCL_NET_PLUGIN=ofi"
    assert status(network.network(made_up.machine(NCCL_NET_PLUGIN="ofi"))) is Status.ok
    assert status(network.network(made_up.machine(NCCL_NET_PLUGIN="none"))) is Status.warning
    made_up.libraries = {"libnccl-net.so"}
    assert status(network.network(made_up.machine())) is Status.ok


def test_interfaces_that_are_not_here(made_up: MadeUp) -> None:
    made_up.file("sys/class/net/eth0/operstate", "up")
    made_up.file("sys/class/net/ib0/operstate", "down")

    def found(choice: str) -> Status | None:
        return status(left_over.interfaces(made_up.machine(NCCL_SOCKET_IFNAME=choice)))

    assert [found(choice) for choice in ("", "eth", "^docker", "=eth0")] == [None] * 4
    assert [found(choice) for choice in ("ib0", "bond0", "^eth")] == [Status.warning] * 3, "the emulation cares not"
    made_up.pci("pci0/gpu0", "0x030200", "0x10de")
    assert found("bond0") is Status.problem


def test_files_that_are_not_here(node: MadeUp) -> None:
    there = node.root / "there.xml"
    there.write_text("<system/>")
    for environment, expected in (
        ({"NCCL_TOPO_FILE": str(there), "NCCL_GRAPH_FILE": str(there)}, None),
        ({"NCCL_TOPO_FILE": "/nowhere/topo.xml"}, Status.warning),
        ({"NCCL_GRAPH_FILE": "/nowhere/graph.xml"}, Status.problem),
        ({"NCCL_GRAPH_FILE": ""}, Status.problem),
    ):
        assert status(left_over.nccl_files(node.machine(**environment))) is expected, environment


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NCCL_DEBUG": "WARN"}, None),
        ({"NCCL_DEBUG": "INFO"}, None),
        ({"NCCL_DEBUG": "trace"}, Status.warning),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL"}, Status.warning),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^COLL"}, None),
    ],
)
def test_a_line_for_each_call(environment, expected, made_up: MadeUp) -> None:
    assert status(left_over.logging(made_up.machine(**environment))) is expected


@pytest.mark.parametrize("path", [".nccl.conf", "etc/nccl.conf"])
def test_files_of_nccl_are_read(path, made_up: MadeUp) -> None:
    made_up.file(path, "NCCL_DEBUG=TRACE # while searching\nNCCL_PROTO = Simple\n")
    check: Callable[[Machine], Finding | None]
    for check in (left_over.logging, nccl.pins):
        found = check(made_up.machine())
        assert (found.status, "nccl.conf" in found.found) == (Status.warning, True)
    assert left_over.logging(made_up.machine(NCCL_DEBUG="WARN")) is None, "the environment comes first"
