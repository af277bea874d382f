"""The report: one self-contained page that says what is known, and how far to trust it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_material import FABRIC, control_windows, make_store, make_summaries, report_of

from zerotune.store.errors import UserError
from zerotune.store.records import Algorithm, Collective, Protocol, Source
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.cli import main
from zerotune.tuner.offline import plots
from zerotune.tuner.offline.explaining import explain
from zerotune.tuner.offline.report import gather
from zerotune.tuner.offline.report.facts import trust
from zerotune.tuner.offline.report.regret import regret_by_step

VOID = {"meta", "br", "link", "hr", "img", "input"}


class Balance(HTMLParser):
    """Fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag


@pytest.fixture
def drawn():
    """Asked for by those that look at pictures."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Drawing takes most of a page's time."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plots, "inline_svg", lambda *_: "")


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store") / "store.db")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, store_path: Path) -> str:
    directory = tmp_path_factory.mktemp("report")
    return report_of(store_path, directory, make_summaries(directory))


def test_the_page_says_what_it_must(page: str):
    for words in (
        f"Emulated fabric {FABRIC}.",
        "workload zero3",
        "step time",
        "exposed communication",
        "ring/ll/8ch",
        "21.3 %",
        "memory pressure",
    ):
        assert words in page, words


def test_the_page_stands_alone_and_is_well_formed(page: str):
    assert not re.search(r'(?:src|href)="(?!#)', page), "something is fetched from elsewhere"
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "two pictures share an id"
    for target in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
        assert target in ids


def test_gain_and_its_interval(store_path: Path, tmp_path: Path):
    facts = gather(store_path, summaries=make_summaries(tmp_path, gain=0.2))
    change = facts.before_after.changes[0]
    assert change.low_percent < -20 < change.high_percent
    assert change.percent == pytest.approx(-20, abs=2)
    assert change.is_beyond_noise


def test_without_summaries_the_job_is_compared_with_its_control_windows(tmp_path: Path):
    path = control_windows(make_store(tmp_path / "s.db"), "job-1", lambda step: 1.25 * step.duration_us)
    facts = gather(path)
    assert facts.before_after.changes[0].percent == pytest.approx(-20, abs=3)
    assert "agent off" not in report_of(path, tmp_path)


def test_regret_falls_when_the_better_setting_takes_over(store_path: Path):
    found = regret_by_step(gather(store_path).measurements)
    assert found is not None
    steps, percent = found
    early, late = percent[steps < 50], percent[steps > 100]
    assert np.median(late) < np.median(early)
    assert abs(np.median(late)) < 3


def test_text_of_strangers_is_escaped(tmp_path: Path):
    evil = "<script>alert(1)</script>"
    text = report_of(make_store(tmp_path / "s.db", reason=evil), tmp_path)
    assert evil not in text
    assert "&lt;script&gt;" in text


def test_the_newest_job_that_trained_is_meant(tmp_path: Path):
    path = make_store(tmp_path / "s.db", "trained")
    with Store.open(path) as store:
        store.record_job("sweep-1", "f", {}, 2)
        store.flush()
    assert gather(path).job.job_id == "trained"
    assert gather(path, "sweep-1").job.job_id == "sweep-1"
    assert explain(path, None, None, None, None) == explain(path, "trained", None, None, None) != []


def altered(path: Path, **values: object) -> Path:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | values))
    return path


def test_a_report_says_that_losses_differ(store_path: Path, tmp_path: Path):
    paths = make_summaries(tmp_path)
    paths[1].write_text(paths[1].read_text().replace((5.0).hex(), (5.1).hex()))
    assert "DIFFERENT" in dict(trust(gather(store_path, summaries=paths)))["Loss"]


def test_a_report_says_that_ranks_disagreed(store_path: Path, tmp_path: Path):
    before, after = make_summaries(tmp_path)
    altered(after, n_disagreements=3)
    warnings = gather(store_path, summaries=[before, after]).before_after.warnings
    assert any(" 3 calls " in warning for warning in warnings)


def test_summaries_are_of_the_job_that_they_name(tmp_path: Path):
    path = make_store(tmp_path / "s.db", "first")
    make_store(path, "second")
    before, after = make_summaries(tmp_path)
    assert gather(path, summaries=[before, after]).job.job_id == "second"
    (warning,) = gather(path, "first", [before, after]).before_after.warnings
    assert "agent on" in warning
    assert "job first" in warning
    altered(after, job_id="first")
    facts = gather(path, summaries=[before, after])
    assert facts.job.job_id == "first"
    assert not facts.before_after.warnings
    with pytest.raises(UserError, match=r"job first, .*second;.*--job"):
        gather(path, "second", [before, after])
    altered(after, job_id="gone")
    (warning,) = gather(path, summaries=[before, after]).before_after.warnings
    assert warning.startswith("Job gone")
    assert warning in report_of(path, tmp_path, [before, after])


def test_runs_that_differ_in_more_than_settings_are_not_compared(store_path: Path, tmp_path: Path):
    before, after = make_summaries(tmp_path)
    altered(before, n_ranks=4)
    for values, match in (
        ({"n_ranks": 2}, r"\b4 ranks, .*\b2;"),
        ({"fabric": "h100_node"}, "h100_node"),
        ({"emulated": False, "fabric": None}, "real NCCL"),
        ({"steps": [{"step": 1, "duration_us": -5.0}]}, after.name),
        ({"steps": [{"step": 1, "duration_us": 5.0, "exposed_us": -1.0}]}, after.name),
    ):
        was = after.read_text()
        with pytest.raises(UserError, match=match):
            gather(store_path, summaries=[before, altered(after, **values)])
        after.write_text(was)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_single_pictures(tmp_path: Path, suffix: str):
    figure = plots.over_steps("t", "y", np.arange(20), np.linspace(1, 2, 20))
    path = tmp_path / f"x{suffix}"
    plots.save(figure, path)
    assert path.stat().st_size > 1000
    with pytest.raises(UserError, match=r"use \.png or \.svg"):
        plots.save(figure, tmp_path / "x.bmp")


def test_names_are_no_formulas(drawn):
    name = r"$\frac{$ costs"
    figure = plots.step_times([(name, np.arange(20), np.linspace(1, 2, 20))], name)
    assert plots.inline_svg(figure, "steps", "x").count(name) == 2


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, pytest.param(1200, marks=pytest.mark.slow)])
def test_in_a_real_browser(page: str, tmp_path: Path, width: int):
    """The page renders, without anything sticking out of a phone's screen."""
    page = page.replace("<details>", "<details open>")
    assert "<details open>" in page
    probe = tmp_path / "probe.html"
    probe.write_text(
        f'<iframe id="page" style="border:0;width:{width}px;height:3000px" srcdoc="" ></iframe>'
        f"<script>const f = document.getElementById('page'); f.srcdoc = {_js(page)};"
        "f.onload = () => { document.body.dataset.width = f.contentDocument.documentElement.scrollWidth;"
        "document.body.dataset.pictures = f.contentDocument.querySelectorAll('figure svg text').length; };</script>"
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,3200", "--virtual-time-budget=4000"]
    done = subprocess.run(
        [*command, "--dump-dom", probe.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    scrolled = re.search(r'data-width="(\d+)"', done.stdout)
    n_texts = re.search(r'data-pictures="(\d+)"', done.stdout)
    assert scrolled is not None
    assert int(scrolled[1]) <= width
    assert n_texts is not None
    assert int(n_texts[1]) > 20


def _js(text: str) -> str:
    import json

    return json.dumps(text).replace("</", "<\\/")


@pytest.mark.parametrize(
    ("source", "known"),
    [(Source.imported, "3 imported"), (Source.sweep, "3 measurements")],
)
@pytest.mark.parametrize("words", [["report"], ["report", "--plot", "winners"]])
def test_a_job_without_training_has_no_report(words, source, known, tmp_path: Path, monkeypatch, capsys):
    """Of a sweep or an import a page would say that NCCL's own choice ran throughout, in no steps."""
    path, out = tmp_path / "s.db", tmp_path / ("out.html" if words == ["report"] else "out.svg")
    rows = np.zeros(3, MEASUREMENT)
    rows["n_ranks"], rows["n_nodes"], rows["message_bytes"], rows["duration_us"] = 2, 1, 4096, 5.0
    rows["algorithm"], rows["protocol"], rows["collective"] = Algorithm.ring, Protocol.ll, Collective.all_gather
    with Store.open(path) as store:
        store.record_job("one", "f", {}, 2)
        rows["source"] = source
        store.record_measurements("f", "one", rows)
        store.flush()
    monkeypatch.setattr("sys.argv", ["zerotune", *words, str(out), "--store", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out, out.exists()) == (2, "", False)
    assert told.err.count("\n") == 1
    assert "job one " in told.err
    assert known in told.err
