"""The virtual clock, by hand-computed figures."""

from __future__ import annotations

import pytest
import torch

from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.emulated.device import clock
from zerotune.agent.nccl.emulated.device.compute import OPTIMIZER_PASSES, ComputeModel


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
