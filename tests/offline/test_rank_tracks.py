"""Tracks of the ranks of a trace, and what a page tells where the pointer rests."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.records import Collective, StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import FLAG_TIMED, OBSERVATION_FIELDS
from zerotune.tuner.cli.app import app
from zerotune.tuner.offline import plots
from zerotune.tuner.offline.replay.reading import load_table
from zerotune.tuner.offline.report.rank_calls import MAX_STEPS, RankCalls, rank_calls

HOSTILE = "</script><b>x</b>"


def test_cells_of_the_winners_tell_all_that_is_known():
    cells = [[plots.Winner(HOSTILE, -20.0, True, 80.0, 100.0), None], [plots.Winner("tree/ll", -9.0, False), None]]
    drawn = plots.inline_svg(plots.winners(["a\nb", "c"], ["1 to\n2", "3"], cells), "winners", "Winners")
    measured, predicted = re.findall(r"<title>(.*?)</title>", drawn, re.DOTALL)
    assert {"a, b", "1 to 2", HOSTILE} <= set(html.unescape(measured).split("\n"))
    assert "80.0" in measured
    assert "100.0" in measured
    assert "predicted" in predicted
    assert HOSTILE not in drawn
    assert "20 % faster" in drawn


def log(folder: Path, rank: int, n_ranks: int, begin_us: np.ndarray, duration_us: np.ndarray, **columns: Any) -> None:
    """A call at each of `begin_us`, four in a step of 1000 us."""
    block = np.zeros(len(begin_us), OBSERVATION_FIELDS)
    number = np.arange(len(begin_us))
    block["start_ns"], block["duration_us"], block["flags"] = begin_us * 1e3, duration_us, FLAG_TIMED
    block["step"], block["sequence"], block["comm_id"] = 1 + number // 4, number, 7
    block["n_ranks"], block["n_nodes"], block["message_bytes"] = n_ranks, 1, 4 << 20
    block["collective"], block["phase"] = Collective.all_gather, 1 + number % 3
    for name, values in columns.items():
        block[name] = values
    made = TraceLog(folder, job_id="job", rank=rank, n_ranks=n_ranks, fabric_id="f", fabric={}, version="0")
    made.record(block)
    made.steps([StepRecord(1 + step, 0, 1000.0) for step in range(len(begin_us) // 4)])
    made.close()


CALLS_US = 1e6 + 250.0 * np.arange(400)


def read(folder: Path) -> RankCalls | str:
    return rank_calls(load_table(folder), folder)


def test_calls_of_all_ranks_stand_on_one_clock_and_name_the_last(tmp_path: Path):
    for rank, waited_us in enumerate((50.0, 0.0, 80.0)):
        ahead_us = 5e9 * rank
        log(tmp_path, rank, 3, CALLS_US + ahead_us - waited_us, np.full(400, 100 + waited_us))
    calls = read(tmp_path)
    numbers = sorted(calls.steps)
    assert len(numbers) == MAX_STEPS
    assert numbers == list(range(numbers[0], numbers[0] + MAX_STEPS))
    assert numbers[0] > 50, "of the settled part"
    assert sorted(set(calls.rank.tolist())) == [0, 1, 2]
    assert set(calls.last_rank.tolist()) == {1}
    waits = [set(np.round(calls.waited_us[calls.rank == rank]).tolist()) for rank in (0, 1, 2)]
    assert waits == [{50}, {0}, {80}]
    ends = (calls.begin_us + calls.rows["duration_us"]).reshape(3, -1)
    assert ends[1] == pytest.approx(ends[0], abs=0.5)
    assert ends[2] == pytest.approx(ends[0], abs=0.5)
    assert not calls.left_out


def test_the_commands_draw_the_ranks_of_a_trace(tmp_path: Path):
    for rank in (0, 1):
        log(tmp_path / "traces", rank, 2, CALLS_US, np.full(400, 100.0 + 50 * rank))
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("job", "f", {}, 2)
        store.flush()
    page, picture = tmp_path / "r.html", tmp_path / "ranks.svg"
    for words in (["report", page], ["report", picture, "--plot", "ranks"]):
        given = [*words, "--store", tmp_path / "s.db", "--trace", tmp_path / "traces"]
        assert CliRunner().invoke(app, list(map(str, given))).exit_code == 0
    (figure,) = re.findall(r'<figure id="ranks">.*?</figure>', page.read_text(), re.DOTALL)
    for text in (figure, picture.read_text()):
        assert {">rank 0<", ">rank 1<"} <= set(re.findall(r">rank [^<]*<", text))
    titles = re.findall(r"<title>(.*?)</title>", figure, re.DOTALL)
    assert any("arrived last" in one for one in titles)
    assert any("waited 50.0 us for rank 0" in one for one in titles)
