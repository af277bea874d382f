"""The arithmetic of NCCL's connection buffers."""

from __future__ import annotations

import pytest

from zerotune.agent import launch
from zerotune.agent.nccl import memory
from zerotune.store.records import Algorithm, CommunicatorClass

NODE = CommunicatorClass(8, 1)
BOXES = CommunicatorClass(16, 16)
BLOCK = 2 << 20
CLUSTER = CommunicatorClass(16, 2)


def test_buffers_are_nccls_defaults() -> None:
    # init.cc: 8 x 512 x 8 x 16, 120 x 640 x 8 x 8, 4 MiB
    assert (memory.LL_BYTES, memory.LL128_BYTES, memory.SIMPLE_BYTES) == (524_288, 4_915_200, 4_194_304)


@pytest.mark.parametrize(
    ("algorithm", "communicator", "expected"),
    [
        (Algorithm.ring, NODE, 6 * BLOCK),  # 9.6 MB on the receiving side, and a block of the sender's
        (Algorithm.ring, BOXES, 10 * BLOCK),  # over a network both sides hold some, LL's but the receiver
        (Algorithm.tree, NODE, 2 * 6 * BLOCK),
        (Algorithm.tree, BOXES, 3 * 10 * BLOCK),
        (Algorithm.tree, CLUSTER, (10 + 6) * BLOCK),  # the other node alone
        (Algorithm.pat, BOXES, 8 * 10 * BLOCK),
        (Algorithm.nvls, NODE, 2 * 8 * (1 << 20)),
    ],
)
def test_a_channels_memory(algorithm: Algorithm, communicator: CommunicatorClass, expected: int) -> None:
    assert memory.channel_bytes(algorithm, communicator) == expected
    assert memory.connection_mb(algorithm, communicator, 16) == pytest.approx(16 * expected / 1e6)


def test_two_ranks_have_one_neighbour() -> None:
    assert memory.n_neighbours(Algorithm.tree, CommunicatorClass(2, 2)) == 1


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
