"""The mock's readers of files that come from anywhere: they refuse, and never crash."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.agent.nccl.compiled import MOCK_CUDA, PLUGIN
from zerotune.agent.nccl.mock_cuda.layouts import NEWEST_KNOWN, layout_of
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.mock_cuda.symbols import functions
from zerotune.agent.nccl.twin.machines import MACHINES
from zerotune.store.errors import UserError

GPU = '<pci busid="0000:0f:00.0" device="0x2331"><gpu dev="0" sm="90"/></pci>'
NET = '<nic><net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1" gdr="1"/></nic>'


def system(inside):
    return f'<system version="1"><cpu numaid="0">{inside}</cpu></system>'


def read(tmp_path, text):
    path = tmp_path / "topology.xml"
    path.write_text(text)
    return read_machine(path)


@pytest.mark.parametrize(
    ("visible_devices", "seen"),
    [(None, [0, 1]), ("1", [1]), ("1, 0", [1, 0]), ("0,7,1", [0]), ("", []), ("GPU-8932f937", [])],
)
def test_a_process_sees_the_gpus_that_it_is_left(tmp_path, visible_devices, seen):
    machine = read(tmp_path, system(GPU + GPU.replace("0f:", "1f:")))
    assert machine.with_visible(visible_devices).gpus == tuple(machine.gpus[i] for i in seen)


@pytest.mark.parametrize("name", list(MACHINES))
def test_shipped_machines_are_read_as_they_are_described(name, tmp_path):
    described = MACHINES[name]
    machine = read(tmp_path, described.topology())
    assert len(machine.gpus) == described.n_gpus
    assert len(machine.nics) == described.n_nics
    assert {gpu.capability for gpu in machine.gpus} == {described.capability}
    assert {gpu.n_nvlinks for gpu in machine.gpus} == {sum(described.nvlinks)}
    assert machine.multicast == (described.capability >= 90 and bool(described.nvlinks))
    assert {nic.speed_mbps for nic in machine.nics} == {1000 * described.nic_gbps}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<system",
        "<other/>",
        system(""),
        system(GPU + GPU),
        system(GPU.replace("0f:00.0", "zz:00.0")),
        system(GPU.replace('sm="90"', "")),
        system(GPU.replace("90", "-1")),
        system(GPU.replace("90", "９０")),
        system(GPU + NET.replace("400000", "1e9")),
        system(GPU + NET.replace("mlx5_0", "x" * 32)),
        system(GPU + NET.replace("0x1", "guid")),
        system(GPU.replace("/></pci>", '><nvlink target="x" count="99"/></gpu></pci>')),
        '<!DOCTYPE x [<!ENTITY a "b">]>' + system(GPU),
    ],
)
def test_text_that_is_no_topology_is_refused(text, tmp_path):
    with pytest.raises(UserError):
        read(tmp_path, text)


def test_a_topology_of_too_many_gpus_or_bytes_is_refused(tmp_path):
    many = "".join(GPU.replace("0f:00", f"{bus:02x}:00") for bus in range(65))
    with pytest.raises(UserError):
        read(tmp_path, system(many))
    with pytest.raises(UserError):
        read(tmp_path, system(GPU + "<!-- " + "x" * (5 << 20) + " -->"))


def test_functions_of_a_library_are_found():
    found = {each.name: each for each in functions(PLUGIN.build())}
    assert found["zerotune_plan_load"].n_bytes > 12


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 64), st.integers(0, 2**64 - 1))
def test_damaged_libraries_are_refused(tmp_path_factory, noise, at, number):
    content = bytearray(MOCK_CUDA.build().read_bytes()[:4096] + noise)
    struct.pack_into("<Q", content, 8 * (at % 7), number)
    path = tmp_path_factory.mktemp("library") / "libnccl.so.2"
    path.write_bytes(content)
    with pytest.raises(UserError):
        functions(path)


def test_only_known_releases_have_a_layout():
    major, minor = NEWEST_KNOWN
    assert layout_of((2, 21, 5)).batches == 0
    assert layout_of((major, minor, 99)).batches == 1
    for version in ((2, 20, 5), (major, minor + 1, 0), (3, 0, 0)):
        with pytest.raises(UserError):
            layout_of(version)
