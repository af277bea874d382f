"""What the environment says about the emulation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_pair import MIB, Pair, issue

from zerotune.agent.nccl.emulated import settings
from zerotune.agent.nccl.emulated.device import clock
from zerotune.agent.nccl.emulated.device.memory import device
from zerotune.agent.nccl.emulated.errors import DeviceOutOfMemory
from zerotune.store.errors import UserError
from zerotune.store.records import Collective


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Read anew with each test, and forgotten afterwards."""
    monkeypatch.setattr(settings, "register_optimizer_step_pre_hook", lambda hook: hook)
    settings.emulation.cache_clear()
    yield monkeypatch
    settings.emulation.cache_clear()
    device().limit_mb = None
    clock.reset()


def test_the_device_can_be_made_smaller(emulation: pytest.MonkeyPatch, pair: Pair) -> None:
    emulation.setenv("ZEROTUNE_COMPUTE", "none")
    emulation.setenv("ZEROTUNE_DEVICE_MB", "139")
    settings.emulation()
    issue(pair(NCCL_MAX_CTAS="1"), Collective.all_reduce, MIB)  # rings of one channel fit, both ranks on one device
    with pytest.raises(DeviceOutOfMemory, match="1 of 139 MB are free"):
        issue(pair(), Collective.all_reduce, MIB)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ZEROTUNE_SEED", "x"),
        ("ZEROTUNE_COMPUTE", "guessed"),
        ("ZEROTUNE_COMPUTE", "measured:-1"),
        ("ZEROTUNE_COMPUTE", "measured:x"),
        ("ZEROTUNE_DEVICE_MB", "much"),
        ("ZEROTUNE_DEVICE_MB", "-5"),
        ("ZEROTUNE_DEVICE_MB", "inf"),
        ("ZEROTUNE_BACKEND_NAME", "gloo"),
        ("ZEROTUNE_NCCL_VERSION", "2.10"),
        ("ZEROTUNE_NCCL_VERSION", "newest"),
        ("ZEROTUNE_FAULTS", "foo"),
        ("ZEROTUNE_FAULTS", "hang:ring"),
        ("ZEROTUNE_FAULTS", "fail:star/ll"),
        ("ZEROTUNE_FAULTS", "force:first:ring/ll"),
        ("ZEROTUNE_FAULTS", "fail:ring/ll/four"),
        ("NCCL_MAX_NCHANNELS", "abc"),
        ("NCCL_MAX_CTAS", "0"),
        ("NCCL_ALGO", "junk"),
        ("NCCL_PROTO", "allreduce:junk"),
    ],
)
def test_nonsense_is_refused_with_its_name(emulation: pytest.MonkeyPatch, variable: str, value: str) -> None:
    emulation.setenv(variable, value)
    with pytest.raises(UserError, match=variable):
        settings.emulation()
