"""While torch captures a graph, the session times no call."""

from types import SimpleNamespace

from zerotune.agent.nccl.emulated import Graph
from zerotune.agent.session import Session
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
