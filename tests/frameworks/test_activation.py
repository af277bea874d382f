"""Until the job's process group exists the agent does nothing that a script could notice."""

import pytest
import torch

from zerotune.agent.session import Session
from zerotune.agent.settings import AgentSettings
from zerotune.agent.steps.hooks import StepHooks


@pytest.mark.parametrize("name", ["is_available", "current_device", "device_count", "mem_get_info"])
def test_cuda_is_not_touched_before_the_rank_joins(monkeypatch, name):
    """It would open the first GPU in every process, and spoil CUDA for forked children."""
    monkeypatch.setattr(f"torch.cuda.{name}", lambda *_: pytest.fail(f"asked torch.cuda.{name}"))
    session = Session(AgentSettings("ipc:///nowhere", "job"), None)
    hooks = StepHooks(session.on_region, session.on_boundary, session.on_replay, session.on_capture)
    hooks.install()
    try:
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter])
        parameter.sum().backward()
        optimizer.step()  # a boundary, but without a process group
    finally:
        hooks.remove()
        session.close()
    assert session.n_errors == 0
