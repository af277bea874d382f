"""Which host decides, and what each of them refuses; what both do is in the other files, which run on both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from emulated_world import World

from benchmarks.lib.nccl import nccl_releases
from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.nccl.emulated import EmulatedNcclError
from zerotune.agent.nccl.emulation_settings import HOST_VARIABLE, choose_host
from zerotune.agent.nccl.mock_cuda import mock
from zerotune.store.errors import UserError

RELEASE = nccl_releases.TESTED[-1]


@pytest.fixture
def libnccl(monkeypatch: pytest.MonkeyPatch) -> Path:
    """NCCL_LIBRARY is set, and nothing else is said about hosts."""
    path = nccl_releases.library_of(RELEASE)
    if not path.exists():
        pytest.skip(f"NCCL {RELEASE} was not fetched: python -m benchmarks nccl_releases {RELEASE}")
    monkeypatch.setenv("NCCL_LIBRARY", str(path))
    return path


def test_the_library_decides_wherever_it_can_stand_for_the_fabric(libnccl: Path) -> None:
    for name in fabrics.names():
        fabric = fabrics.load(name)
        choice = choose_host({}, fabric)
        assert (choice.library, choice.obstacle) == (libnccl, "") if fabric.node else choice.library is None
        if fabric.node:
            assert choice.release == RELEASE


@pytest.mark.parametrize(
    "environment",
    [
        {"ZEROTUNE_NCCL_VERSION": "rccl-2.27.7"},
        {"ZEROTUNE_NCCL_VERSION": "2.21.5"},
        {"ZEROTUNE_FAULTS": "force:0:ring/ll/1"},
    ],
)
def test_the_model_decides_where_the_library_cannot(libnccl: Path, environment: dict[str, str]) -> None:
    fabric = fabrics.load("h100_node")
    choice = choose_host(environment, fabric)
    assert choice.library is None
    assert choice.obstacle
    assert choose_host({HOST_VARIABLE: "model"}, fabric).library is None
    with pytest.raises(UserError):  # asked for by name, it must not be left out silently
        choose_host(environment | {HOST_VARIABLE: "library"}, fabric)


def test_the_model_decides_beside_a_real_driver(libnccl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock, "DRIVER_FILES", (str(tmp_path),))
    fabric = fabrics.load("h100_node")
    assert choose_host({}, fabric).library is None
    monkeypatch.setenv(mock.FORCE, "force")
    assert choose_host({}, fabric).library == libnccl


def test_a_library_that_is_cut_off_does_not_decide(
    libnccl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be loaded, and would end the process once its missing part is touched."""
    cut_off = tmp_path / "libnccl.so.2"
    with libnccl.open("rb") as whole:
        cut_off.write_bytes(whole.read(1 << 20))
    monkeypatch.setenv("NCCL_LIBRARY", str(cut_off))
    assert choose_host({}, fabrics.load("h100_node")).library is None


def test_a_host_that_does_not_exist_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match=HOST_VARIABLE):
        choose_host({HOST_VARIABLE: "gpu"}, fabrics.load("h100_node"))


def _refuses_windows(rank: int) -> bool:
    try:
        dist.group.WORLD.register_window(torch.ones(4))
    except EmulatedNcclError:
        return True
    return False


def test_only_the_model_has_windows(model_world: World, library_world: World) -> None:
    assert set(model_world.run(_refuses_windows)) == {False}
    assert set(library_world.run(_refuses_windows)) == {True}
