"""What a sweep says of settings that it did not visit or that NCCL refused; its workers are scripted."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Protocol, TimingSource
from zerotune.tuner.offline.sweep import SweepRequest, SweepResult, render, run_sweep
from zerotune.tuner.offline.sweep.protocol import Measure, MeasuredCalls
from zerotune.tuner.offline.sweep.run import ready_emulated
from zerotune.tuner.offline.sweep.unvisited import Why

FIELDS = {"fabric": "ethernet_boxes", "n_ranks": 2, "collectives": ("all_gather",), "min_bytes": 65536}
REQUEST = SweepRequest(**FIELDS, max_bytes=1 << 20)


class ScriptedGroup:
    """Workers that take what the fabric's truth says, without noise; NCCL refuses the `refused` protocol."""

    refused: Protocol | None = None
    n_visits = 10_000
    """Ctrl-C comes after so many."""

    def __init__(self, n_ranks: int, name: str, collectives, **_asked: bool) -> None:
        self._fabric = fabric.load(name)
        self._communicator = self._fabric.communicator(range(n_ranks))
        self._topology = self._fabric.topology(self._communicator)
        self.ready = ready_emulated(REQUEST, collectives)

    def measure(self, command: Measure, timeout_s: float) -> list[MeasuredCalls]:
        type(self).n_visits -= 1
        if self.n_visits < 0:
            raise KeyboardInterrupt
        where, ran = (command.collective, command.message_bytes), command.candidate
        if ran == BASELINE:
            ran = cost_model.default_choice(self._topology, *where)
        elif ran.protocol is self.refused:
            ran = Candidate(Algorithm.ring, Protocol.simple, 1)
        us = self._fabric.truth_us(
            self._communicator, command.collective, ran.algorithm, ran.protocol, ran.n_channels, command.message_bytes
        )
        times_us = (us,) * command.n_repeats
        source = int(TimingSource.emulated)
        return [MeasuredCalls(command.epoch, times_us, ran.algorithm, ran.protocol, ran.n_channels, source, True)]

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def sweep(**fields: object) -> SweepResult:
        script = {name: fields.pop(name) for name in ("refused", "n_visits") if name in fields}
        monkeypatch.setattr("zerotune.tuner.offline.sweep.run.WorkerGroup", type("Group", (ScriptedGroup,), script))
        request = SweepRequest(**{**FIELDS, "max_bytes": 1 << 20, **fields})
        result = run_sweep(request, tmp_path / "s.db", lambda *_: None)
        assert result.n_visited + len(result.unvisited) == result.n_cells, "each has its reason"
        return result

    return sweep


def reasons(result: SweepResult) -> Counter[Why]:
    return Counter(one.why for one in result.unvisited)


def test_an_active_sweep_says_of_each_setting_why_it_was_not_visited(swept):
    result = swept(budget=1.0)
    assert set(reasons(result)) <= {Why.slower, Why.tie}
    slower = [one.slower_percent for one in result.unvisited if one.why is Why.slower]
    assert slower
    assert min(slower) > 3, "beyond the wanted precision"
    out = io.StringIO()
    render(result, Console(file=out, width=160))
    assert f" {len(slower)} " in out.getvalue()
    again = swept(budget=1.0)
    assert reasons(again)[Why.known] == result.n_visited


@pytest.mark.parametrize("full", [False, True])
def test_settings_that_nccl_refuses_are_told_as_such(swept, full):
    result = swept(full=full, refused=Protocol.ll, budget=1.0)
    refused = [row for row in result.rows if "/ll/" in row.setting]
    assert refused
    assert {(row.outcome, row.n_samples) for row in refused} == {("failed", 0)}
    assert all("ring/" in row.reason for row in refused), "the reason names what ran"
    again = swept(full=full, budget=1.0)
    assert reasons(again)[Why.broken] >= len(refused)
    assert not any("/ll/" in row.setting and row.is_best for row in again.rows)
