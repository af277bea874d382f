"""While torch captures a graph, the session times no call; it joins no job before NCCL has made a communicator."""

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from zerotune.agent.nccl.emulated import Graph
from zerotune.agent.session import POLL_S, Session, World
from zerotune.agent.settings import ENV_FABRIC, AgentSettings
from zerotune.agent.steps.hooks import StepHooks


def test_calls_that_are_captured_are_not_timed_whatever_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv(ENV_FABRIC, "ethernet_boxes")
    capturing = []
    plugin = SimpleNamespace(
        n_calls=lambda: 0, set_observing=lambda _: None, set_capturing=capturing.append, set_recording=lambda _: None
    )
    session = Session(AgentSettings("ipc:///nowhere", "job", trace_dir=tmp_path), plugin)
    hooks = StepHooks(session.on_region, session.on_boundary, session.on_replay, session.on_capture)
    hooks.install()
    try:
        graph = Graph()
        with graph.capture():
            assert capturing == [True]
        assert capturing == [True, False]
    finally:
        hooks.remove()
        session.close()


@pytest.mark.parametrize("made", [{"tuner_abi": 5}, {"n_timed": 1}], ids=["with our tuner", "with another's tuner"])
def test_a_rank_joins_once_its_communicator_is_made_and_not_while_nccl_makes_it(monkeypatch, made):
    """The profiler is told of a communicator first, and what ranks compare when they join is not known yet."""
    looked = []
    now = World.now
    monkeypatch.setattr(World, "now", lambda: looked.append(True) or now())
    seen = {"tuner_abi": 0, "n_communicators": 1, "n_timed": 0}
    plugin = SimpleNamespace(
        n_calls=lambda: 0,
        set_observing=lambda _: None,
        set_recording=lambda _: None,
        counters=lambda: SimpleNamespace(**seen),
        tuner_abi=lambda: seen["tuner_abi"],
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    session = Session(AgentSettings("ipc:///nowhere", "job"), plugin)
    try:
        time.sleep(5 * POLL_S)
        assert not looked
        seen.update(made)
        until_s = time.monotonic() + 60.0
        while not looked and time.monotonic() < until_s:
            time.sleep(POLL_S)
        assert looked
    finally:
        session.close()
        dist.destroy_process_group()
