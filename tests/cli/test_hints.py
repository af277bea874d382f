"""Where something is missing, commands say what it is and where it may be."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.paths import default_store_path
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    Protocol,
)
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner import cli
from zerotune.tuner.demo import demo
from zerotune.tuner.demo import progress as demo_progress
from zerotune.tuner.fingerprint.encoding.weights import record, shipped_blob
from zerotune.tuner.modeling.medians import MeasuredSetting


def said(monkeypatch, capsys, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["zerotune", *map(str, words)])
    with pytest.raises(SystemExit):
        cli.main()
    captured = capsys.readouterr()
    return captured.out + captured.err


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as `make run` leaves it: a store, and traces beside it."""
    Store.open(tmp_path / "store.db").close()
    block = np.zeros(4, OBSERVATION_FIELDS)
    block["message_bytes"], block["n_ranks"], block["n_nodes"], block["collective"] = 1 << 20, 2, 1, 2
    block["duration_us"], block["flags"], block["sequence"] = 50.0, 2, np.arange(4)
    log = TraceLog(tmp_path / "traces", job_id="j", rank=0, n_ranks=2, fabric_id="f", fabric={}, version="0")
    log.record(block)
    log.close()
    return tmp_path


def test_replay_without_store_names_the_one_beside_the_trace(run: Path, monkeypatch, capsys):
    hint = f"{run / 'store.db'}: --store"
    assert hint in unwrapped(said(monkeypatch, capsys, "replay", run / "traces", "--store", run / "none.db"))
    Store.open(run / "other.db").close()
    assert hint in unwrapped(said(monkeypatch, capsys, "replay", run / "traces", "--store", run / "other.db"))
    assert hint not in unwrapped(said(monkeypatch, capsys, "replay", run / "traces", "--store", run / "store.db"))


def test_replay_of_a_trace_without_fabric_does_not_blame_the_store(tmp_path: Path, monkeypatch, capsys):
    columns = "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric"
    row = "allgather,1048576,default,default,0,2,16,1,0,0,0,120.5"
    (tmp_path / "t.csv").write_text(f"{columns},bandwidth_gbps,latency_us\n{row}\n")
    Store.open(tmp_path / "empty.db").close()
    text = said(monkeypatch, capsys, "replay", tmp_path / "t.csv", "--store", tmp_path / "empty.db")
    (note,) = [line for line in unwrapped(text).split(".") if "measured elsewhere" in line]
    assert "store" not in note


def test_an_endpoint_that_can_be_none_is_named_as_such(monkeypatch, capsys):
    for command in (["status"], ["metrics"]):
        text = said(monkeypatch, capsys, *command, "--endpoint", "nonsense")
        assert "endpoint 'nonsense' " in text


def test_a_folder_is_no_command(tmp_path: Path, monkeypatch, capsys):
    assert str(tmp_path) in said(monkeypatch, capsys, "launch", "--no-agent", "--", tmp_path)


def test_the_list_of_pictures_says_what_is_missing(run: Path, monkeypatch, capsys):
    with Store.open(run / "store.db") as store:
        store.record_job("job", "f", {}, 2)
        store.flush()
    lines = said(monkeypatch, capsys, "plot", "list", "--store", run / "store.db").splitlines()
    missing = {line.split()[0]: line for line in lines if "(" in line}
    assert "`launch --log-trace`: --trace" in missing["timeline"]
    assert "steps" in missing


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_demo_tells_how_far_a_run_is_while_it_lasts(is_terminal: bool, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(demo_progress, "LOOK_EVERY_S", 0.02)
    losses, out = tmp_path / "losses.jsonl", io.StringIO()
    losses.write_text("of a run before\n" * 10)
    console = Console(file=out, width=120, force_terminal=is_terminal)
    write = "import sys, time\nfor _ in range(10): print(file=open(sys.argv[1], 'a')); time.sleep(0.1)"
    with demo_progress.Progress(console, "agent off", losses, 10) as progress:
        assert is_terminal or "agent off ..." in out.getvalue(), "at once, not at the end"
        assert "10 of 10" not in out.getvalue()
        with subprocess.Popen([sys.executable, "-c", write, str(losses)]) as process:
            assert progress.wait(process, 60) == 0
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            with pytest.raises(TimeoutError):
                progress.wait(process, 0.2)
            process.kill()
    told = re.findall(r"agent off: step (\d+) of 10", out.getvalue())
    assert told
    assert is_terminal or len(told) <= 5, "in a file a line each fifth of the steps"


def test_the_demo_shows_what_was_not_decided(capsys):
    console = Console(file=sys.stdout, width=120)
    settled = DecisionKey(CommunicatorClass(2, 2), Collective.all_gather, Phase.forward_gather, 80)
    other = DecisionKey(CommunicatorClass(2, 2), Collective.all_reduce, Phase.other, 8)
    own = MeasuredSetting(66.0, 10, Candidate(Algorithm.ring, Protocol.ll, 1))

    here = {settled: {BASELINE: own}, other: {BASELINE: own}}
    demo.print_decisions(console, [Decision("j", "f", settled, BASELINE, 1, "keep", "")], here, {})
    lines = [line for line in capsys.readouterr().out.splitlines() if "the same: " in line]
    assert ["all_reduce" in line for line in lines] == [False, True]
    assert len({line.partition("the same: ")[2] for line in lines}) == 2, "nothing better, and nothing decided"


def test_a_trace_without_steps_is_told_where_its_timeline_is_missing(run: Path, monkeypatch, capsys):
    columns = "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric"
    measurements = run / "m.csv"
    measurements.write_text(
        f"{columns},bandwidth_gbps,latency_us\nallgather,1048576,ring,simple,4,2,16,1,0,0,0,120.5\n"
    )
    with Store.open(run / "store.db") as store:
        store.record_job("job", "f", {}, 2)
        store.flush()
    words = ("--store", run / "store.db", "--trace", measurements)
    told = said(monkeypatch, capsys, "report", run / "r.html", *words)
    why = "the trace has no steps"
    picture = said(monkeypatch, capsys, "plot", "timeline", run / "t.png", *words)
    for text in (told, (run / "r.html").read_text(), picture):
        assert why in text, "the same reason everywhere"
    assert not (run / "t.png").exists()


def test_metrics_of_a_store_that_is_not_there_is_a_mistake(tmp_path: Path, monkeypatch, capsys):
    told = said(monkeypatch, capsys, "metrics", "--store", tmp_path / "none.db", "--endpoint", f"ipc://{tmp_path}/d")
    assert str(tmp_path / "none.db") in unwrapped(told)


def test_metrics_without_a_daemon_says_that_they_are_the_stores(run: Path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["zerotune", "metrics", "--store", str(run / "store.db"), "--endpoint", f"ipc://{run}/d"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert ended.value.code in (0, None)
    assert "zerotune_up 0.0" in captured.out
    assert f"ipc://{run}/d" in captured.err


def test_comparing_sweeps_takes_no_options_of_measuring(tmp_path: Path, monkeypatch, capsys):
    words = ("sweep", "--compare", "a", "b", "--fabric", "ethernet_boxes", "--store", tmp_path / "s.db")
    assert "--compare" in unwrapped(said(monkeypatch, capsys, *words))


@pytest.mark.parametrize("command", [("stage", "test"), ("replay",), ("import",)])
def test_a_store_in_place_of_a_trace_gets_a_remedy_that_the_command_has(command, run: Path, monkeypatch, capsys):
    told = unwrapped(said(monkeypatch, capsys, *command, run / "store.db"))
    assert "SQLite" in told
    assert "zerotune export FILE --to measurements" in told
    assert "--store" not in told


def test_without_a_store_what_was_trained_into_the_default_one_is_shown(tmp_path: Path, monkeypatch, capsys):
    """Those are what `zerotune daemon` would use."""
    monkeypatch.delenv("ZEROTUNE_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert "store.db" not in said(monkeypatch, capsys, "stage", "show"), "there is none"
    with Store.open(default_store_path()) as store:
        store.save_model(record("lstm", shipped_blob("lstm")))
    assert str(tmp_path) in unwrapped(said(monkeypatch, capsys, "stage", "show"))


def test_an_interrupted_demo_names_what_is_incomplete(tmp_path: Path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo", interrupted)
    monkeypatch.setattr(sys, "argv", ["zerotune", "demo", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/" in line
