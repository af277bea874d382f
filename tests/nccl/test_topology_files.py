"""Topology files as clouds and racks have them: what they leave to the machine is asked for, not guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.agent.nccl.mock_cuda.machine import Machine, read_machine
from zerotune.agent.nccl.twin.twin import topology_file
from zerotune.store.errors import UserError
from zerotune.tuner.advice.constants import DEFAULT
from zerotune.tuner.advice.hardware.clusters import cluster
from zerotune.tuner.advice.hardware.network import links_of

H100, A100, L40S, V100 = 90, 80, 89, 70
ADAPTER = '<pci busid="0101:00:0{}.0" class="0x020700"/>'
BARE = '<pci busid="000{}:00:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/>'
UNLINKED = '<pci busid="0000:4{0}:00.0" class="0x030200"><gpu dev="{0}" sm="90" rank="{0}" gdr="1"/></pci>'
RACK = (
    '<pci busid="00{0:02d}:06:00.0" class="0x030200" device="0x2941"><gpu dev="{0}" sm="100" rank="{0}" gdr="1">'
    '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/><c2c bw="44712" count="5"/></gpu></pci>'
)


def write(folder: Path, device: str, n: int, *more: str, host: str = "") -> str:
    inside = "".join(device.format(place) for place in range(n))
    path = folder / "cloud.xml"
    path.write_text(f'<system version="1"><cpu {host} numaid="0">{inside}{"".join(more)}</cpu></system>')
    return str(path)


def read(name: str, capability: int | None = None, nic_gbps: float | None = None) -> Machine:
    with topology_file(name, capability, nic_gbps) as path:
        assert path.stem == "cloud"
        return read_machine(path)


@pytest.mark.parametrize(("capability", "n_nvlinks"), [(H100, 18), (A100, 12), (L40S, 0)])
def test_bare_devices_become_what_the_user_says(tmp_path: Path, capability: int, n_nvlinks: int) -> None:
    name = write(tmp_path, BARE, 8, *map(ADAPTER.format, range(4)))
    before = Path(name).read_bytes()
    machine = read(name, capability, 200)
    assert [(gpu.capability, gpu.n_nvlinks, gpu.behind_switch) for gpu in machine.gpus] == [
        (capability, n_nvlinks, n_nvlinks > 0)
    ] * 8
    assert [nic.speed_mbps for nic in machine.nics] == [200_000] * 4
    assert machine.multicast == (capability == H100)
    assert Path(name).read_bytes() == before
    assert not read(name, capability).nics


@pytest.mark.parametrize(
    ("capability", "nic_gbps", "says"), [(H100, None, "--gpu 90"), (None, 400, "--nic-gbps 400"), (100, 100, None)]
)
def test_options_may_not_contradict_a_topology_file(tmp_path: Path, capability, nic_gbps, says: str | None) -> None:
    net = '<pci busid="0000:50:00.0" class="0x020000"><nic><net name="e0" dev="0" speed="100000"/></nic></pci>'
    name = write(tmp_path, RACK, 4, net, ADAPTER.format(1))
    if says is None:
        assert read(name, capability, nic_gbps) == read(name)
    else:
        with pytest.raises(UserError, match=says):
            read(name, capability, nic_gbps)
    assert [gpu.n_nvlinks for gpu in read(name).gpus] == [18] * 4
    assert links_of(read(name)).gpu_gbs == pytest.approx(18 * 40.1)


def test_eight_gpus_of_a_baseboard_without_links_are_asked_about(tmp_path: Path) -> None:
    name = write(tmp_path, UNLINKED, 8)
    with pytest.raises(UserError, match="--gpu"):
        read(name)
    with pytest.raises(UserError, match="80"):
        read(name, A100)
    assert {gpu.n_nvlinks for gpu in read(name, H100).gpus} == {18}
    dumped = write(tmp_path, UNLINKED.replace('class="0x030200"', 'class="0x030200" device="0x2331"'), 8)
    assert {gpu.n_nvlinks for gpu in read(dumped).gpus} == {0}


@pytest.mark.parametrize(
    ("device", "n", "capability", "says"),
    [
        (BARE, 8, None, "--gpu"),
        (BARE, 8, V100, "linked"),
        (BARE, 4, H100, "linked"),
        (UNLINKED, 4, None, "without links"),
        (UNLINKED, 4, H100, "linked"),
        ('<pci busid="0000:00:1{}.0"/>', 8, H100, "NCCL_TOPO_DUMP_FILE"),
        (BARE.replace("000{}", "x{}"), 8, H100, "x0:00:00.0"),
        ('<pci busid="0000:0f:00.0"><gpu dev="0" sm="107"/><gpu dev="0" sm="107"/></pci>', 1, None, "cloud.xml"),
    ],
)
def test_topologies_without_facts_are_refused(tmp_path: Path, device: str, n: int, capability: int, says: str) -> None:
    name = write(tmp_path, device, n)
    with pytest.raises(UserError, match=says) as refused:
        read(name, capability)
    assert name in str(refused.value)


def test_a_dump_of_several_hosts_is_no_node(tmp_path: Path) -> None:
    second = '</cpu><cpu host_hash="0x2" numaid="1">' + RACK.format(9)
    with pytest.raises(UserError, match="several hosts"):
        read(write(tmp_path, RACK, 4, second, host='host_hash="0x1"'))


@pytest.mark.parametrize("speed", ['speed="-1"', ""])
def test_adapters_of_unknown_speed_are_what_nccl_takes_them_for(tmp_path: Path, speed: str) -> None:
    net = f'<nic><net name="e0" dev="0" {speed}/></nic>'
    name = write(tmp_path, RACK, 4, net)
    assert [nic.speed_mbps for nic in read(name).nics] == [10_000]
    assert [nic.speed_mbps for nic in read(name, None, 400).nics] == [400_000]
    assert cluster(name, 1, DEFAULT).gpus_per_node == 4
    with pytest.raises(UserError, match="--nic-gbps"):
        cluster(name, 2, DEFAULT)
