"""Every way in which torch makes a process group leads to the emulated NCCL, and other backends are left alone."""

import sys

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zerotune.agent import emulation


@pytest.fixture
def undone(monkeypatch):
    """Takes every replacement back."""
    for name in ("init_process_group", "new_group"):
        original = getattr(c10d, name)
        for module in tuple(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                monkeypatch.setattr(module, name, original)


@pytest.mark.usefixtures("undone")
def test_device_meshes_use_the_replacements_too():
    originals = {id(c10d.init_process_group), id(c10d.new_group)}
    emulation.install()
    emulation.install()
    left = [
        module.__name__
        for module in tuple(sys.modules.values())
        for name in ("init_process_group", "new_group")
        if id(getattr(module, "__dict__", {}).get(name)) in originals
    ]
    assert left == []
    assert dist.device_mesh.init_process_group is dist.init_process_group


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("nccl", emulation.BACKEND),
        ("cpu:gloo,cuda:nccl", emulation.BACKEND),
        ("cuda:nccl,cpu:gloo", emulation.BACKEND),
        ("NCCL", emulation.BACKEND),
        ("mpi", "mpi"),
        ("cpu:gloo,cuda:ucc", "cpu:gloo,cuda:ucc"),
        (emulation.BACKEND, emulation.BACKEND),
    ],
)
def test_backends_of_nccl_are_replaced_and_no_others(asked, made):
    assert emulation.emulated_backend(asked, asks_default=True) == made
    assert emulation.emulated_backend(asked, asks_default=False) == made


def test_gloo_by_default_stands_for_nccl_and_beside_a_default_group_is_gloo():
    assert emulation.emulated_backend("gloo", asks_default=True) == emulation.BACKEND
    assert emulation.emulated_backend("gloo", asks_default=False) == "gloo"
    assert emulation.emulated_backend("cpu:gloo", asks_default=False) == "cpu:gloo"


def test_no_backend_means_the_default_groups():
    assert emulation.emulated_backend(None, asks_default=True) == emulation.BACKEND
    assert emulation.emulated_backend(None, asks_default=False) is None


@pytest.mark.parametrize(
    ("configured", "is_nccl"),
    [
        ("cuda:nccl", True),  # init_process_group("nccl")
        ("cpu:gloo,cuda:nccl", True),  # init_process_group() on a machine with GPUs
        ("nccl", True),
        ("cpu:gloo", False),
        ("cpu:gloo,cuda:gloo", False),
        ("cuda:ucc", False),
        (f"cpu:{emulation.BACKEND}", False),
    ],
)
def test_configured_backends_that_count_as_nccl(configured, is_nccl):
    assert emulation.uses_nccl(configured) == is_nccl


def test_torch_names_backends_as_the_table_above_has_them():
    configured = [str(c10d.BackendConfig(c10d.Backend(name))) for name in ("nccl", "cpu:gloo,cuda:nccl")]
    assert configured == ["cuda:nccl", "cpu:gloo,cuda:nccl"]
