"""The arithmetic of NCCL's connection buffers."""

from __future__ import annotations

import pytest

from zerotune.agent import launch
from zerotune.agent.nccl import memory


@pytest.mark.parametrize(("limit_mb", "expected"), [(5.0, 1), (21.0, 1), (42.0, 2), (190.0, 9)])
def test_channels_within_a_limit(limit_mb: float, expected: int) -> None:
    assert memory.channels_within(limit_mb) == expected


def test_channels_within_a_limit_by_a_fabrics_figures() -> None:
    assert memory.channels_within(100.0, channel_mb=9.0, fixed_mb=60.0) == 4
    assert memory.channels_within(10.0, channel_mb=9.0, fixed_mb=60.0) == 1


@pytest.mark.parametrize(
    ("fabric", "limit_mb", "expected"), [("ethernet_boxes", 100.0, "4"), (None, 100.0, "4"), (None, None, None)]
)
def test_launch_limits_channels_by_memory(fabric: str | None, limit_mb: float | None, expected: str | None) -> None:
    request = launch.LaunchRequest(["true"], fabric, nccl_memory_mb=limit_mb, environment={})
    assert launch.environment(request).get("NCCL_MAX_CTAS") == expected
    by_user = launch.LaunchRequest(["true"], fabric, nccl_memory_mb=limit_mb, environment={"NCCL_MAX_CTAS": "2"})
    assert launch.environment(by_user)["NCCL_MAX_CTAS"] == "2"
