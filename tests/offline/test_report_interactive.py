"""Pictures that can be hovered over: the data of the drawn ones, in a page that needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.records import StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner.offline import plots
from zerotune.tuner.offline.report import gather, write_page
from zerotune.tuner.offline.report.interactive import specification

HOSTILE = "</script><b>x</b>"


def test_lines_are_those_of_the_picture():
    steps, durations_us = np.arange(40), np.linspace(1000, 2000, 40)
    text = specification(plots.step_times([(HOSTILE, steps, durations_us)], "t", [7]))
    assert "<" not in text
    drawn = json.loads(text)
    every, usual, change, *_ = drawn["data"]
    assert every["x"] == steps.tolist()
    assert every["y"] == pytest.approx((durations_us / 1e3).tolist())
    assert usual["name"] == "&lt;/script&gt;&lt;b&gt;x&lt;/b&gt;"
    assert change["x"] == [7, 7]
    assert {one["xaxis"] for one in drawn["data"]} == {"x", "x2"}


def test_bars_are_those_of_the_timeline():
    step = ("one", 900.0, [(0.0, 100.0), (300.0, 400.0)], [("forward_gather", 100.0, 300.0)], [])
    drawn = json.loads(specification(plots.step_timelines([step], ["forward_gather"])))
    computation, communication = (one for one in drawn["data"] if one["type"] == "bar")
    assert computation["base"] == pytest.approx([0, 0.3])
    assert computation["x"] == pytest.approx([0.1, 0.1])
    assert (communication["base"], communication["x"]) == (pytest.approx([0.1]), pytest.approx([0.2]))
    assert communication["y"][0] != computation["y"][0]


def test_a_table_stays_a_picture():
    assert not specification(plots.winners(["a"], ["1 to 2"], [[plots.Winner("ring/ll", -9.0, True)]]))


def test_the_page_carries_the_script_where_it_is_asked_for(tmp_path: Path):
    pytest.importorskip("plotly")
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("job", "fabric", {}, 2)
        store.record_steps("job", [StepRecord(step, step // 10, 1000.0 + step) for step in range(1, 40)])
        store.flush()
    facts = gather(tmp_path / "s.db")
    plain = write_page(facts, tmp_path / "plain.html").read_text()
    page = write_page(facts, tmp_path / "page.html", is_interactive=True).read_text()
    assert "Plotly" not in plain
    assert 3e6 < len(page) - len(plain) < 8e6
    assert not re.search(r"<script[^>]* src=", page)
    assert json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])["data"]
