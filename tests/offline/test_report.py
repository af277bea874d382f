"""The report: one self-contained page that says what is known, and how far to trust it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_material import FABRIC, FAST, N_STEPS, control_windows, make_store, make_summaries

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.errors import UserError
from zerotune.store.passages import Passage, PassageKind, Passages
from zerotune.store.records import Algorithm, Collective, Protocol, Source, StepRecord
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.cli import main
from zerotune.tuner.demo import demo
from zerotune.tuner.offline import plots
from zerotune.tuner.offline.explanations import explain
from zerotune.tuner.offline.importing.command import import_measurements
from zerotune.tuner.offline.report import gather, write_report
from zerotune.tuner.offline.report.facts import trust
from zerotune.tuner.offline.report.page import pictures, regret_by_step

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
def page_path(tmp_path_factory: pytest.TempPathFactory, store_path: Path) -> Path:
    directory = tmp_path_factory.mktemp("report")
    return write_report(store_path, directory / "report.html", summaries=make_summaries(directory))


def test_the_page_says_what_it_must(page_path: Path):
    text = page_path.read_text()
    for words in (
        f"Emulated fabric {FABRIC}.",
        "workload zero3",
        "step time",
        "exposed communication",
        "ring/ll/8ch",
        "21.3 %",
        "memory pressure",
    ):
        assert words in text, words


def test_an_algorithm_under_an_unknown_protocol_is_shown_and_explained(tmp_path: Path):
    store_path, table = make_store(tmp_path / "s.db"), tmp_path / "m.csv"
    columns = "n_ranks,n_nodes,message_bytes,duration_us,collective,phase,algorithm,protocol,n_channels,is_default"
    row = f"2,2,{256 << 10},9,all_gather,forward_gather,ring,,0,0"
    table.write_text("\n".join([columns, *[row] * 8]) + "\n")
    with Store.open(store_path, read_only=True) as store:
        (fabric_id,) = store.fabrics()
    said = {"setting": None, "is_default": False, "n_nodes": None, "dry_run": False}
    assert import_measurements(table, store_path, fabric_id=fabric_id, **said)[1] == 8
    (one,) = explain(store_path, "job-1", "all_gather", "forward_gather", 256 << 10)
    shown = [other for other in one.alternatives if other["candidate"] == "ring/any"]
    assert [(other["median_us"], other["n_all_jobs"], other["n_this_job"]) for other in shown] == [(9.0, 8, 0)]
    assert one.setting == str(FAST), "it is no candidate, however fast"
    assert "ring/any" in write_report(store_path, tmp_path / "r.html", job_id="job-1").read_text()


def test_the_page_stands_alone_and_is_well_formed(page_path: Path):
    text = page_path.read_text()
    assert not re.search(r'(?:src|href)="(?!#)', text), "something is fetched from elsewhere"
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    balance = Balance()
    balance.feed(text)
    assert balance.open == []
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "two pictures share an id"
    for target in re.findall(r'(?:href="#|url\(#)([^")]+)', text):
        assert target in ids


def test_pictures_follow_the_theme(page_path: Path):
    text = page_path.read_text()
    svg = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert svg.count("<svg") == 5
    for colour in plots.THEME:
        assert colour not in svg
    assert "var(--ink)" in svg
    assert "<text" in svg, "text must stay text"


def test_gain_and_its_interval(store_path: Path, tmp_path: Path):
    facts = gather(store_path, summaries=make_summaries(tmp_path, gain=0.2))
    change = facts.before_after.changes[0]
    assert change.low_percent < -20 < change.high_percent
    assert change.percent == pytest.approx(-20, abs=2)
    assert change.is_beyond_noise


def test_no_change_is_called_noise(store_path: Path, tmp_path: Path):
    facts = gather(store_path, summaries=make_summaries(tmp_path, gain=0.0))
    assert not facts.before_after.changes[0].is_beyond_noise


def test_without_summaries_the_job_is_compared_with_its_control_windows(tmp_path: Path):
    path = control_windows(make_store(tmp_path / "s.db"), "job-1", lambda step: 1.25 * step.duration_us)
    facts = gather(path)
    assert facts.before_after.changes[0].percent == pytest.approx(-20, abs=3)
    assert "agent off" not in write_report(path, tmp_path / "r.html").read_text()


def test_different_losses_are_shouted(store_path: Path, tmp_path: Path):
    paths = make_summaries(tmp_path)
    paths[1].write_text(paths[1].read_text().replace((5.0).hex(), (5.1).hex()))
    assert "DIFFERENT" in dict(trust(gather(store_path, summaries=paths)))["Loss"]


def test_regret_falls_when_the_better_setting_takes_over(store_path: Path):
    found = regret_by_step(gather(store_path).measurements)
    assert found is not None
    steps, percent = found
    early, late = percent[steps < 50], percent[steps > 100]
    assert np.median(late) < np.median(early)
    assert abs(np.median(late)) < 3


def test_what_strangers_wrote_is_escaped(tmp_path: Path):
    evil = "<script>alert(1)</script>"
    text = write_report(make_store(tmp_path / "s.db", reason=evil), tmp_path / "r.html").read_text()
    assert evil not in text
    assert "&lt;script&gt;" in text


def test_an_empty_job_still_gets_a_page(tmp_path: Path):
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("bare", "f", {}, 2)
        store.flush()
    text = write_report(tmp_path / "s.db", tmp_path / "r.html").read_text()
    assert "</html>" in text
    assert gather(tmp_path / "s.db").before_after.changes == []


def test_the_newest_job_that_trained_is_meant(tmp_path: Path):
    path = make_store(tmp_path / "s.db", "trained")
    with Store.open(path) as store:
        store.record_job("sweep-1", "f", {}, 2)
        store.flush()
    assert gather(path).job.job_id == "trained"
    assert gather(path, "sweep-1").job.job_id == "sweep-1"
    assert explain(path, None, None, None, None) == explain(path, "trained", None, None, None) != []


def test_mistakes_are_told_in_one_sentence(store_path: Path, tmp_path: Path):
    with pytest.raises(UserError, match="none"):
        write_report(tmp_path / "none.db", tmp_path / "r.html")
    with pytest.raises(UserError, match="no job 'x' in"):
        write_report(store_path, tmp_path / "r.html", job_id="x")
    with pytest.raises(UserError, match="cannot write"):
        write_report(store_path, tmp_path / "no" / "r.html")
    (tmp_path / "bad.json").write_text('{"label": 3}')
    with pytest.raises(UserError, match=r"bad\.json"):
        gather(store_path, summaries=[tmp_path / "bad.json"] * 2)
    with pytest.raises(UserError, match=r"^1 "):
        gather(store_path, summaries=make_summaries(tmp_path)[:1])


def altered(path: Path, **values: object) -> Path:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | values))
    return path


def test_the_demos_summaries_name_its_job(tmp_path: Path):
    path = make_store(tmp_path / "s.db", "first")
    make_store(path, "second")
    steps = [{"step": step, "epoch": 0, "duration_us": 100.0, "exposed_us": 1.0} for step in range(1, 80)]
    losses = [1.0] * 80
    off, on = (
        demo.DemoRun(label, steps, [loss.hex() for loss in losses], losses, 0, 1.0, job_id)
        for label, job_id in (("agent off", ""), ("agent on", "first"))
    )
    demo.write_summaries(tmp_path, "ethernet_boxes", off, on)
    facts = gather(path, summaries=[tmp_path / "off.json", tmp_path / "on.json"])
    assert facts.job.job_id == "first"
    assert not facts.before_after.warnings


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
    assert warning in write_report(path, tmp_path / "r.html", summaries=[before, after]).read_text()


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


def test_steps_of_no_time_or_no_computation_end_in_words(store_path: Path, tmp_path: Path):
    before, after = make_summaries(tmp_path)
    steps = [{"step": step, "duration_us": 5.0, "exposed_us": 5.0} for step in range(60)]
    for path in (before, after):
        altered(path, steps=steps)
    found = gather(store_path, summaries=[before, after]).before_after
    assert [one.name for one in found.changes] == ["step time", "exposed communication"]
    altered(before, steps=[one | {"duration_us": 0.0} for one in steps])
    found = gather(store_path, summaries=[before, after]).before_after
    assert found.changes == []
    assert found.explanation


def test_ranks_that_disagreed_are_told_beside_the_figures(store_path: Path, tmp_path: Path):
    before, after = make_summaries(tmp_path)
    altered(after, n_disagreements=3)
    warnings = gather(store_path, summaries=[before, after]).before_after.warnings
    assert any(" 3 calls " in warning for warning in warnings)


def test_swapped_summaries_are_told_of(store_path: Path, tmp_path: Path):
    before, after = make_summaries(tmp_path)
    altered(after, steps=[one | {"epoch": 1} for one in json.loads(after.read_text())["steps"]])
    (usual, swapped) = (
        gather(store_path, summaries=pair).before_after.warnings for pair in ([before, after], [after, before])
    )
    assert len(swapped) == len(usual) + 1


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_single_pictures(tmp_path: Path, suffix: str):
    figure = plots.over_steps("t", "y", np.arange(20), np.linspace(1, 2, 20))
    path = tmp_path / f"x{suffix}"
    plots.save(figure, path)
    assert path.stat().st_size > 1000
    with pytest.raises(UserError, match=r"use \.png or \.svg"):
        plots.save(figure, tmp_path / "x.bmp")


def test_many_sizes_make_the_heat_map_wider_not_its_words_overlap():
    def figure(n_sizes: int):
        cells = [[plots.Winner("nvls_tree/simple/16ch", -12.0, False)] * n_sizes]
        return plots.winners(["all_gather\nforward_gather"], ["131.1 kB to\n262.1 kB"] * n_sizes, cells)

    for n_sizes in (3, 5, 6, 14):
        drawn = figure(n_sizes)
        drawn.draw_without_rendering()
        boxes = sorted((text.get_window_extent() for text in drawn.axes[0].texts), key=lambda box: box.x0)
        assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes)), n_sizes
    assert figure(14).get_figwidth() > figure(3).get_figwidth()


@pytest.mark.usefixtures("drawn")
def test_pictures_are_the_same_each_time(store_path: Path):
    facts = gather(store_path)
    assert [one.svg for one in pictures(facts)] == [one.svg for one in pictures(facts)]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, pytest.param(1200, marks=pytest.mark.slow)])
def test_in_a_real_browser(page_path: Path, tmp_path: Path, width: int):
    """The page renders, without anything sticking out of a phone's screen."""
    page = page_path.read_text().replace("<details>", "<details open>")
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


def test_collectives_are_told_by_their_medians_if_steps_are_not_compared(tmp_path: Path):
    facts = gather(make_store(tmp_path / "s.db", n_untuned=5))
    assert not facts.before_after.changes
    own_us, us = facts.collectives_us() or (0.0, 0.0)
    assert us / own_us == pytest.approx(0.97, abs=0.02), "small ones gain 30 %, large ones are most of the time"


def test_decisions_that_no_step_ran_under_gain_nothing(tmp_path: Path):
    path = make_store(tmp_path / "s.db", n_untuned=N_STEPS)
    facts = gather(path)
    assert facts.collectives_us() is None
    text = write_report(path, tmp_path / "r.html").read_text()
    assert text.count("not adopted") >= 6
    assert "not adopted" not in write_report(make_store(tmp_path / "t.db"), tmp_path / "t.html").read_text()


def test_steps_without_time_are_explained(tmp_path: Path):
    with Store.open(tmp_path / "s.db") as store:
        for job_id, steps in (
            ("whole", range(50)),
            ("usual", range(1, 50)),
            ("killed", [*range(1, 20), *range(40, 50)]),
        ):
            store.record_job(job_id, "f", {}, 2)
            store.record_steps(job_id, [StepRecord(step, 0, 1000.0) for step in steps])
        store.flush()
    reasons = {job_id: gather(tmp_path / "s.db", job_id).untimed for job_id in ("whole", "usual", "killed")}
    assert reasons["whole"] == []
    assert len(reasons["usual"]) == 1
    assert len(reasons["killed"]) == 2
    assert " 20 " in f" {reasons['killed'][1]}"


def test_alternatives_are_those_of_explain(store_path: Path):
    explained = {one.key: one.alternatives for one in explain(store_path, None, None, None, None)}
    facts = gather(store_path)
    assert {one.key: one.alternatives for one in facts.explained()} == explained
    assert explained


def _js(text: str) -> str:
    import json

    return json.dumps(text).replace("</", "<\\/")


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("exposed_us", [100.0, None])
def test_timelines_of_traced_runs(store_path: Path, tmp_path: Path, exposed_us: float | None):
    folders = []
    for name, us in (("off", 300.0), ("on", 150.0)):
        block = np.zeros(60, OBSERVATION_FIELDS)
        block["message_bytes"], block["n_ranks"], block["n_nodes"], block["collective"] = 1 << 20, 2, 2, 2
        block["sequence"], block["step"] = np.arange(60), np.arange(60) // 6
        block["start_ns"], block["duration_us"] = 1 + np.arange(60) * 400_000, us
        block["phase"], block["flags"] = 1 + np.arange(60) % 3, 2
        log = TraceLog(tmp_path / name, job_id="j", rank=0, n_ranks=2, fabric_id="", fabric={}, version="0")
        log.record(block)
        log.steps([StepRecord(step, 0, 2400.0, exposed_us) for step in range(10)])
        log.close()
        folders.append(tmp_path / name)
    text = write_report(store_path, tmp_path / "r.html", traces=folders).read_text()
    assert 'id="timeline"' in text
    assert "gradient scatter" in text
    if exposed_us is None:
        assert "before: step" in text
    assert ("after, 2.4 ms" in text) == ("communication, exposed" in text) == (exposed_us is not None)


@pytest.mark.parametrize(
    ("source", "known"),
    [(Source.imported, "3 imported"), (Source.sweep, "3 measurements")],
)
@pytest.mark.parametrize("words", [["report"], ["plot", "winners"]])
def test_what_did_not_train_has_no_report(words, source, known, tmp_path: Path, monkeypatch, capsys):
    """Of a sweep or an import a page would say that NCCL's own choice ran throughout, in no steps."""
    path, out = tmp_path / "s.db", tmp_path / "out.svg"
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


@pytest.mark.parametrize("words", [["report"], ["plot", "winners"]])
def test_what_another_store_measured_live_and_was_imported_has_no_report(words, tmp_path: Path, monkeypatch, capsys):
    path, out, table = tmp_path / "s.db", tmp_path / "out.svg", tmp_path / "measurements.csv"
    header = "job_id,fabric_id,collective,n_ranks,n_nodes,message_bytes,duration_us,algorithm,protocol,source,step"
    rows = [f"theirs,f,all_gather,8,1,4096,{us},ring,ll,live,{step}" for step, us in enumerate((5.0, 6.0, 7.0))]
    table.write_text("\n".join([header, *rows, ""]))
    monkeypatch.setattr("sys.argv", ["zerotune", "import", str(table), "--store", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    with Store.open(path, read_only=True) as store:
        assert set(store.measurements()["source"]) == {Source.live}
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["zerotune", *words, str(out), "--store", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, out.exists()) == (2, False)
    told = "zerotune: job theirs did not train: the store has 3 imported measurements of it; name a job that trained"
    assert capsys.readouterr().err.startswith(told)


def test_a_job_that_ran_here_without_any_step_has_a_report(tmp_path: Path):
    """A script that never says where a step ends."""
    path = tmp_path / "s.db"
    rows = np.zeros(3, MEASUREMENT)
    rows["n_ranks"], rows["n_nodes"], rows["message_bytes"], rows["duration_us"] = 2, 1, 4096, 5.0
    with Store.open(path) as store:
        store.record_job("one", "f", {}, 2)
        store.record_measurements("f", "one", rows)
    assert write_report(path, tmp_path / "r.html").exists()


def test_two_summaries_are_enough_for_a_report(tmp_path: Path):
    """Whatever the newest job of the store is."""
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.record_job("one", "f", {}, 2)
        rows = np.zeros(3, MEASUREMENT)
        rows["algorithm"], rows["message_bytes"], rows["source"] = Algorithm.ring, 4096, Source.sweep
        store.record_measurements("f", "one", rows)
    assert write_report(path, tmp_path / "r.html", summaries=make_summaries(tmp_path)).exists()


def test_what_passed_the_tuner_by_is_named_where_something_did(tmp_path):
    store_path = make_store(tmp_path / "store.db")
    before = {what for what, _ in trust(gather(store_path))}
    with Store.open(store_path) as store:
        kinds = (Passage(PassageKind.decided, 3, 3000, 3, 90.0), Passage(PassageKind.symmetric, 1, 1000, 1, 10.0))
        store.update_job("job-1", passages=Passages(kinds))
    ((_, words),) = [line for line in trust(gather(store_path)) if line[0] not in before]
    assert re.findall(r"[\d.]+ %", words) == ["25.0 %", "10.0 %"]
