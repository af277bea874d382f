"""The virtual clock, by hand-computed figures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.emulated.device import clock
from zerotune.agent.nccl.emulated.device.compute import OPTIMIZER_PASSES, ComputeModel


def _slowdown(n_channels: int) -> float:
    return 1.0 + n_channels / 10


def test_computation_is_slowed_while_channels_are_held() -> None:
    timeline = clock.Clock(_slowdown)
    timeline.advance(100)
    timeline.hold(110, 140, 5)  # factor 1.5: 20 us of work take the 30 us
    timeline.hold(130, 150, 5)  # with the other: 2.0 for 10 us, then 1.5 for 10 us
    timeline.advance(10)
    assert timeline.now_us() == 110
    timeline.advance(20 / 1.5)
    assert timeline.now_us() == pytest.approx(130)
    timeline.advance(10 / 2.0 + 10 / 1.5 + 7)
    assert timeline.now_us() == pytest.approx(157)
    assert timeline.exposed_us() == 0


def test_waiting_moves_the_clock_and_counts_as_exposed() -> None:
    timeline = clock.Clock()
    timeline.advance(50)
    timeline.wait_until(30)
    assert (timeline.now_us(), timeline.exposed_us()) == (50, 0)
    timeline.wait_until(80)
    assert (timeline.now_us(), timeline.exposed_us()) == (80, 30)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 50), st.integers(1, 20)), max_size=6),
       st.lists(st.floats(0, 30), max_size=6))  # fmt: skip
def test_time_is_monotonic_and_never_less_than_the_work(
    holds: list[tuple[float, float, int]], pieces: list[float]
) -> None:
    timeline = clock.Clock(_slowdown)
    for start_us, duration_us, n_channels in holds:
        timeline.hold(start_us, start_us + duration_us, n_channels)
    work_us = before_us = 0.0
    for piece in pieces:
        timeline.advance(piece)
        work_us += piece
        assert timeline.now_us() >= before_us
        before_us = timeline.now_us()
    assert timeline.now_us() >= work_us - 1e-6
    most = _slowdown(sum(n_channels for _, _, n_channels in holds))
    assert timeline.now_us() <= work_us * most + 1e-6


def _run_hooked() -> tuple[float, float, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    timeline = clock.reset()
    model(torch.ones(4, 8)).sum().backward()
    before_us = timeline.now_us()
    optimizer.step()
    return before_us, timeline.now_us() - before_us, [p.detach().clone() for p in model.parameters()]


def test_hooks_charge_forward_backward_and_step_and_change_no_value() -> None:
    without = _run_hooked()
    assert without[:2] == (0, 0)
    compute = fabric.load("h100_node").compute
    handles = ComputeModel(compute).install()
    try:
        with_hooks = _run_hooked()
    finally:
        for handle in handles:
            handle.remove()
    forward_us = (
        3 * compute.launch_us + compute.matmul_us(2 * (64 + 8) * 4) + compute.stream_us(3 * 32 * 4)
    )  # fmt: skip
    assert with_hooks[0] == pytest.approx(3 * forward_us)
    n_parameters = 64 + 8 + 8 + 1
    assert with_hooks[1] == pytest.approx(compute.launch_us + compute.stream_us(OPTIMIZER_PASSES * 4 * n_parameters))
    assert all(map(torch.equal, without[2], with_hooks[2]))
