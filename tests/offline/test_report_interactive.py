"""Pictures that can be hovered over: the data of the drawn ones, in a page that needs nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_material import make_store
from typer.testing import CliRunner

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.records import Collective, StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import FLAG_TIMED, OBSERVATION_FIELDS
from zerotune.tuner.cli.app import app
from zerotune.tuner.offline import plots
from zerotune.tuner.offline.replay.table import load_table
from zerotune.tuner.offline.report import gather, write_page
from zerotune.tuner.offline.report.interactive import specification
from zerotune.tuner.offline.report.rank_calls import (
    MAX_STEPS,
    RankCalls,
    rank_calls,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><b>x</b>"


def test_cells_of_the_winners_tell_all_that_is_known():
    cells = [[plots.Winner(HOSTILE, -20.0, True, 80.0, 100.0), None], [plots.Winner("tree/ll", -9.0, False), None]]
    drawn = json.loads(specification(plots.winners(["a\nb", "c"], ["1 to\n2", "3"], cells)))
    (boxes,) = drawn["data"]
    measured = boxes["customdata"][0]
    assert {"a, b", "1 to 2", "&lt;/script&gt;&lt;b&gt;x&lt;/b&gt;"} <= set(measured.split("<br>"))
    assert "80.0" in measured
    assert "100.0" in measured
    strong, weak = boxes["marker"]["opacity"]
    assert strong > weak, "by what is saved"
    assert boxes["marker"]["pattern"]["shape"] == ["", "/"]
    assert boxes["y"] == pytest.approx([0, 1])
    words = [one["text"] for one in drawn["layout"]["annotations"]]
    assert any("-20 %" in one for one in words)
    assert drawn["layout"]["xaxis"]["ticktext"] == ["1 to<br>2", "3"]


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


def test_the_command_puts_the_ranks_of_a_trace_on_the_page(tmp_path: Path):
    pytest.importorskip("plotly")
    for rank in (0, 1):
        log(tmp_path / "traces", rank, 2, CALLS_US, np.full(400, 100.0))
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("job", "f", {}, 2)
        store.flush()
    out = tmp_path / "r.html"
    words = ["report", out, "--store", tmp_path / "s.db", "--trace", tmp_path / "traces", "--interactive"]
    assert CliRunner().invoke(app, list(map(str, words))).exit_code == 0
    figure = r'<figure id="ranks">.*?<script type="application/json">(.*?)</script>'
    found = re.search(figure, out.read_text(), re.DOTALL)
    assert json.loads(found[1])["layout"]["yaxis"]["ticktext"] == ["rank 0", "rank 1"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
@pytest.mark.slow
def test_tracks_and_winners_in_a_browser(tmp_path: Path):
    """Give ZEROTUNE_SCREENSHOTS a folder to look at the page oneself."""
    pytest.importorskip("plotly")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'zerotune[browser]'")
    shots = Path(os.environ.get("ZEROTUNE_SCREENSHOTS", tmp_path))
    for rank in range(4):
        waited_us = 40.0 * (3 - rank) * (1 + np.sin(np.arange(400)) / 2)
        log(tmp_path / "traces", rank, 4, CALLS_US - waited_us, 100 + waited_us)
    facts = gather(make_store(tmp_path / "s.db"), traces=[tmp_path / "traces"])
    page_path = write_page(facts, tmp_path / "page.html", is_interactive=True)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, scheme in ((1360, "light"), (390, "dark")):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
            page = context.new_page()
            problems: list[str] = []
            page.on("pageerror", lambda error, found=problems: found.append(str(error)))
            page.goto(page_path.as_uri())
            for name in ("winners", "ranks"):
                page.wait_for_selector(f"#{name} .bars .point")
                page.locator(f"#{name}").scroll_into_view_if_needed()
                bar = page.locator(f"#{name} .bars .point").first.bounding_box()
                page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
                page.wait_for_selector(f"#{name} .hovertext")
                page.screenshot(path=shots / f"report-{name}-{width}.png")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            assert problems == []
        browser.close()
