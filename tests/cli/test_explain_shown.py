"""What `zerotune explain` prints: what figures mean, what is in force and why, and what there is where nothing fits."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from zerotune.store.passages import OtherPlugin, Passages
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    ModelRecord,
    Phase,
    Protocol,
    StepRecord,
    size_class,
)
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner import cli
from zerotune.tuner.learning.explaining.decision_records import why_tried
from zerotune.tuner.modeling.medians import medians
from zerotune.tuner.offline import explanations
from zerotune.tuner.offline.comparison import compare
from zerotune.tuner.offline.explanations_shown import render
from zerotune.tuner.offline.jobs.listing import list_jobs
from zerotune.tuner.offline.report.facts import gather

PLACE = CommunicatorClass(2, 1)
KEY = DecisionKey(PLACE, Collective.all_gather, Phase.forward_gather, size_class(1 << 20))
RING, SIMPLE, PAT = (
    Candidate(Algorithm.ring, Protocol.ll, 8),
    Candidate(Algorithm.ring, Protocol.simple, 4),
    Candidate(Algorithm.pat, Protocol.simple, 4),
)
BASELINE_RAN = Candidate(Algorithm.ring, Protocol.simple, 1)


def weighed(candidate: Candidate, *, note: str = "", is_guess: bool = False) -> dict[str, Any]:
    one = {"candidate": str(candidate), "predicted_us": 9.0, "predicted_low_us": 8.0, "predicted_high_us": 10.0}
    return one | {"is_guess": is_guess, "measured_us": None, "n_measurements": 0, "spent_us": 0.0, "note": note}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "s.db") as opened:
        opened.record_job("job", "fabric", {}, 2)
        for message_bytes, is_guess in ((1 << 20, True), (1 << 24, False)):
            key = msgspec.structs.replace(KEY, size_class=size_class(message_bytes))
            lines = json.dumps([weighed(BASELINE, is_guess=is_guess)])
            opened.record_decisions([Decision("job", "fabric", key, BASELINE, 1, "keep", "so", alternatives=lines)])
        opened.flush()
    return tmp_path / "s.db"


def explained(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["zerotune", "explain", *words])
    with pytest.raises(SystemExit):
        cli.main()
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def written(path: Path, *decisions: Decision, block: np.ndarray | None = None, highest_epoch: int = 9) -> Path:
    with Store.open(path) as opened:
        opened.record_job("job", "fabric", {}, 2)
        opened.record_steps("job", [StepRecord(step, min(step, highest_epoch), 1000.0) for step in range(20)])
        opened.record_decisions(decisions)
        if block is not None:
            opened.record_measurements("fabric", "job", block)
        opened.flush()
    return path


def decided(
    kind: str, candidate: Candidate, reason: str, step: int, *, key: DecisionKey = KEY, **notes: str
) -> Decision:
    lines = [weighed(one, note=notes.get(name, "")) for name, one in (("ring", RING), ("tree", SIMPLE), ("pat", PAT))]
    alternatives = json.dumps(lines)
    return Decision("job", "fabric", key, candidate, step, kind, reason, alternatives=alternatives, step=10 * step)


def measured(n_calls: int, message_bytes: int = 1 << 20, candidate: Candidate = RING, **fields: object) -> np.ndarray:
    block = np.zeros(n_calls, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["collective"], block["phase"] = 2, 1, Collective.all_gather, 1
    block["message_bytes"], block["duration_us"] = message_bytes, 50.0
    block["algorithm"], block["protocol"] = candidate.algorithm, candidate.protocol
    block["n_channels"] = candidate.n_channels
    for name, value in fields.items():
        block[name] = value
    return block


def test_the_tuner_whose_choice_the_baseline_is_is_named(store: Path, monkeypatch, capsys):
    assert "ofi" not in explained(monkeypatch, capsys, "--store", str(store))
    with Store.open(store) as opened:
        opened.update_job("job", passages=Passages(others=(OtherPlugin("tuner", "ofi"), OtherPlugin("profiler", "x"))))
        opened.flush()
    assert "tuner ofi" in explained(monkeypatch, capsys, "--store", str(store))
    explained_as_json = json.loads(explained(monkeypatch, capsys, "--store", str(store), "--json"))
    assert {one["job"]["baseline"] for one in explained_as_json} == {"ofi"}


def test_what_is_still_to_be_tried_does_not_count_as_tried(tmp_path: Path, monkeypatch, capsys):
    trial = decided("explore", RING, "why", 1)
    ran, to_come = (written(tmp_path / f"{epoch}.db", trial, highest_epoch=epoch) for epoch in (9, 0))
    assert "1 of them" in explained(monkeypatch, capsys, "--store", str(ran))
    assert "1 of them" not in explained(monkeypatch, capsys, "--store", str(to_come))


def test_guesses_and_expectations_have_names_of_their_own(store: Path, monkeypatch, capsys):
    text = explained(monkeypatch, capsys, "--store", str(store), "--all")
    assert text.index("guessed us (90 %)") < text.index("expected us (90 %)"), "the smaller message comes first"
    assert "guessed: " in text, "the word is explained"


def test_what_takes_and_saves_most_comes_first_and_quiet_keys_are_one_line(tmp_path: Path, monkeypatch, capsys):
    keys = [msgspec.structs.replace(KEY, size_class=size_class(n_bytes)) for n_bytes in (1 << 12, 1 << 16, 1 << 20)]
    quiet, lost, saved = keys
    blocks = [
        measured(2, n_bytes, ran, step=steps, duration_us=us, is_default=ran == BASELINE_RAN)
        for n_bytes, ran, steps, us in (
            (1 << 12, BASELINE_RAN, [0, 1], 20.0),
            (1 << 16, BASELINE_RAN, [0, 0], 50.0),
            (1 << 16, RING, [1, 1], 60.0),
            (1 << 20, BASELINE_RAN, [0, 0], 400.0),
            (1 << 20, RING, [1, 1], 300.0),
        )
    ]
    decisions = [decided("promote", RING, "faster", 1, key=key) for key in (lost, saved)]
    nothing = decided("keep", BASELINE, "nothing better", 1, key=quiet)
    path = written(tmp_path / "s.db", nothing, *decisions, block=np.concatenate(blocks))
    told = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert [DecisionKey(**one["key"]).size_class for one in told] == [key.size_class for key in (saved, lost, quiet)]
    shares = [(one["calls_per_step"], one["step_percent"], one["saved_us"], one["saved_percent"]) for one in told]
    assert shares == [(2.0, 60.0, 200.0, 20.0), (2.0, 12.0, -20.0, -2.0), (1.0, 2.0, 0.0, 0.0)]
    assert [one["is_quiet"] for one in told] == [False, False, True]
    detail = "all_gather forward_gather, {:,} to"
    texts = [explained(monkeypatch, capsys, "--store", str(path), *words) for words in ((), ("--all",))]
    for text in texts:
        figures = [text.index(words) for words in ("+200 us (+20.0 %)", "-20 us (-2.0 %)", "+180 us (+18.0 %)")]
        assert figures == sorted(figures)
    brief, whole = texts
    assert [text.count(detail.format(n_bytes)) for text in texts for n_bytes in (1 << 12, 1 << 20)] == [0, 0, 1, 1]
    assert whole.index(detail.format(1 << 20)) < whole.index(detail.format(1 << 16))
    assert re.search(r" 3 decisions .*--all", brief)
    one_key = explained(monkeypatch, capsys, "--store", str(path), "--message-bytes", str(1 << 12))
    assert detail.format(1 << 12) in one_key, "whoever asks for a key sees it"


@pytest.mark.parametrize(
    "decision", [decided("rollback", BASELINE, "steps were slower", 1), decided("explore", RING, "predicted faster", 1)]
)
def test_where_nccls_own_choice_runs_there_is_no_row(tmp_path: Path, decision: Decision, monkeypatch, capsys):
    path = written(tmp_path / "s.db", decision, block=measured(4, candidate=BASELINE_RAN, is_default=True))
    row = "all_gather forward_gather "
    assert row not in explained(monkeypatch, capsys, "--store", str(path))
    assert row in explained(monkeypatch, capsys, "--store", str(path), "--all")


def test_damaged_measurements_count_as_calls_and_are_named(tmp_path: Path, monkeypatch, capsys):
    ran = measured(40, 1 << 20, BASELINE_RAN, step=np.arange(40) // 4, is_default=True)
    path = written(tmp_path / "s.db", block=ran)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE measurements SET duration_us = -5 WHERE step % 2 OR id % 4 = 1")
    (told,) = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert (told["calls_per_step"], told["job"]["n_damaged"]) == (4.0, 25)
    assert told["step_percent"] == pytest.approx(20)
    assert "25 measurements" in explained(monkeypatch, capsys, "--store", str(path), "--all")


def test_what_is_saved_is_of_a_step_under_nccls_own_choice_as_jobs_has_it(tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "s.db"
    own, tuned = (measured(20, 1 << 20, ran, step=range(at, at + 20), duration_us=us, is_default=ran == BASELINE_RAN)
                  for ran, at, us in ((BASELINE_RAN, 0, 400.0), (RING, 20, 200.0)))  # fmt: skip
    with Store.open(path) as opened:
        opened.record_job("job", "fabric", {}, 2)
        windows = {step: 2 + step // 12 for step in range(36, 140) if step % 12 < 2}
        epochs = [0] * 20 + [windows.get(step, 1) for step in range(20, 140)]
        opened.record_steps("job", [StepRecord(at, one, 600.0 if one == 1 else 800.0) for at, one in enumerate(epochs)])
        opened.record_decisions([decided("promote", RING, "faster", 1)])
        opened.record_decisions([decided("control", BASELINE, "a window", one) for one in {*windows.values()}])
        opened.record_measurements("fabric", "job", np.concatenate([own, tuned]))
        opened.flush()
    (one,) = explanations.explain(path, None, None, None, None)
    (line,) = list_jobs(path, limit=1)
    assert (one.saved_us, one.saved_percent) == (200.0, pytest.approx(25.0))
    assert one.saved_percent == pytest.approx(line.gain.saved_percent)
    assert one.job.gain == line.gain
    words = explained(monkeypatch, capsys, "--store", str(path))
    assert words.count("+200 us (+25.0 %)") == 3, "of the key, of all calls, and of whole steps"


@pytest.mark.parametrize("shows_all", [False, True])
def test_on_80_columns_no_word_and_no_number_is_broken(tmp_path: Path, shows_all: bool):
    key = msgspec.structs.replace(KEY, collective=Collective.reduce_scatter, phase=Phase.gradient_scatter)
    key = msgspec.structs.replace(key, size_class=size_class(1 << 30))
    many = Candidate(Algorithm.ring, Protocol.simple, 16)
    block = np.concatenate([measured(40, 1 << 30, ran, step=range(40), is_default=ran == BASELINE_RAN, duration_us=us)
                            for ran, us in ((BASELINE_RAN, 91_234.5), (many, 81_234.5))])  # fmt: skip
    block["collective"], block["phase"] = key.collective, key.phase
    path = written(tmp_path / "s.db", decided("promote", many, "faster", 1, key=key), block=block)
    out = io.StringIO()
    (one,) = explanations.explain(path, None, None, None, None)
    render([one], Console(file=out, width=80), one.job, shows_all=shows_all)
    words = out.getvalue().split()
    for whole in ("reduce_scatter", "gradient_scatter", str(many), "1,073,741,824", f"{one.max_bytes:,}"):
        assert whole in words


def test_a_size_without_decision_gets_those_there_are(store: Path, monkeypatch, capsys):
    text = explained(monkeypatch, capsys, "--store", str(store), "--message-bytes", "4096")
    assert "No decision fits" in text
    assert "all_gather forward_gather: 1,048,576 to 1,246,974; " in text
    assert "guessed" not in text


def test_a_trial_of_what_is_predicted_slower_says_what_it_may_gain():
    assert "20 %" in why_tried(50.0, 60.0, 40.0)
    for low_us in (55.0, 49.9):
        why = why_tried(50.0, 60.0, low_us)
        assert why
        assert "%" not in why, "no promise of 0 %"
    assert why_tried(50.0, 45.0, 40.0) == "", "its prediction is reason enough"
    assert why_tried(None, 60.0, 40.0) == why_tried(50.0, None, None) == ""


def test_news_of_the_job_is_told_once_and_is_no_keys_reason(tmp_path: Path, monkeypatch, capsys):
    other = msgspec.structs.replace(KEY, size_class=84)
    faster, pace, regime = "measured 5 % faster than baseline", "training's own pace changed", "regime change: 1.50"
    path = written(
        tmp_path / "s.db",
        decided("promote", RING, faster, 3),
        decided("promote", SIMPLE, "measured 7 % faster than baseline", 3, key=other),
        decided("pace", RING, pace, 5),
        decided("keep", RING, regime, 6),
    )
    text = explained(monkeypatch, capsys, "--store", str(path), "--all")
    assert text.index(f"step 50, epoch 5: {pace}") < text.index("all_gather forward_gather, ")
    assert text.count(pace) == text.count(regime) == 1
    assert f"promote, 1970-01-01 00:00:00, step 30, epoch 3: {faster}" in text
    told = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert [len(one["job_history"]) for one in told] == [2, 2], "whoever asks for one key sees it, too"
    assert [one["decision"]["kind"] for one in told] == ["promote", "promote"]
    assert [(one["collective"], one["phase"]) for one in told] == [("all_gather", "forward_gather")] * 2
    assert [one["decision"]["alternatives"] for one in told] == ["[]", "[]"], "they are there, once"


def test_what_made_a_setting_what_it_is_goes_before_what_was_found_since(tmp_path: Path, monkeypatch, capsys):
    path = written(
        tmp_path / "s.db",
        decided("explore", RING, "hope", 1),
        decided("promote", RING, "measured 5 % faster than baseline", 2),
        decided("keep", RING, f"{PAT}: measured 9 % slower than {RING}", 4, pat=f"measured 9 % slower than {RING}"),
    )
    text = explained(monkeypatch, capsys, "--store", str(path), "--all")
    assert f": {RING} promote, 1970-01-01 00:00:00, step 20" in text
    assert text.index("earlier: ") < text.index("later: ")
    assert f"{PAT}: measured 9 % slower than {RING} (step 40)" in text


def test_a_note_is_dated_and_what_was_promoted_since_has_none(tmp_path: Path, monkeypatch, capsys):
    tie, slow = "measured 1.0 % faster than baseline, too little to be sure yet", "measured 3.0 % slower than baseline"
    path = written(
        tmp_path / "s.db",
        decided("lead", RING, f"{tie}; it runs in most steps until that is known", 2, ring=tie),
        decided("keep", BASELINE, f"{RING}: measured 1 % slower than baseline by now: it runs no longer", 3, ring=tie),
        decided("keep", BASELINE, f"{SIMPLE}: {slow}", 3, ring=tie, tree=slow),
        decided("promote", RING, "measured 1.1 % faster than baseline", 5, ring=tie, tree=slow),
    )
    told = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))[0]
    notes = {one["candidate"]: (one["note"], one["noted_step"], one["is_past"]) for one in told["alternatives"]}
    assert notes[str(RING)][0] == "", "it is in force: nothing speaks against it any more"
    assert notes[str(SIMPLE)] == (slow, 30, True)
    text = explained(monkeypatch, capsys, "--store", str(path), "--all")
    assert f"{SIMPLE}: {slow} (step 30, " in text


def test_a_trial_that_has_begun_is_not_what_is_in_force(tmp_path: Path, monkeypatch, capsys):
    """As in a job that was killed meanwhile."""
    path = written(tmp_path / "s.db", decided("explore", RING, "hope", 1))
    (told,) = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert (told["setting"], told["n_explored"]) == ("baseline", 1)
    assert ": baseline " in explained(monkeypatch, capsys, "--store", str(path), "--all")


def test_what_leads_heads_its_key_while_others_are_tried(tmp_path: Path, monkeypatch, capsys):
    """It is what runs, though nobody has proved that it should."""
    tie = "measured 1.0 % faster than baseline, too little to be sure yet"
    until = f"{tie}; it runs in most steps until that is known"
    lead = decided("lead", RING, until, 2, ring=tie)
    slow = decided("keep", RING, f"{PAT}: measured 9 % slower than {RING}", 4, ring=tie, pat="measured 9 % slower")
    path = written(tmp_path / "s.db", decided("explore", RING, "hope", 1), lead, slow)
    text = explained(monkeypatch, capsys, "--store", str(path), "--all")
    assert f": {RING} lead, 1970-01-01 00:00:00, step 20, epoch 2: {until}" in text
    (told,) = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert (told["setting"], told["decision"]["kind"]) == (str(RING), "lead")
    ended = decided("keep", BASELINE, f"{RING}: the network is another: it runs no longer", 5, ring=tie)
    over = written(tmp_path / "t.db", lead, slow, ended)
    assert ": baseline keep, 1970" in explained(monkeypatch, capsys, "--store", str(over), "--all")


def test_a_trial_that_no_step_ran_under_is_none(tmp_path: Path, monkeypatch, capsys):
    path = written(
        tmp_path / "s.db", decided("explore", SIMPLE, "hope", 1), decided("explore", RING, "hope", 2), highest_epoch=1
    )
    (told,) = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert (told["n_explored"], told["is_trial_to_come"]) == (1, True)
    assert gather(path).n_explored() == 1


def test_what_was_decided_and_no_step_ran_under_is_not_in_force(tmp_path: Path, monkeypatch, capsys):
    """As where a rank has no agent, or the job was over too soon."""
    promoted = decided("promote", RING, "measured 5 % faster than baseline", 2)
    path = written(tmp_path / "s.db", decided("explore", RING, "hope", 1), promoted, highest_epoch=0)
    assert ": baseline promote, 1970" in explained(monkeypatch, capsys, "--store", str(path), "--all")
    (told,) = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert (told["setting"], told["not_adopted"]) == ("baseline", str(RING))


@pytest.mark.parametrize(
    ("decisions", "setting", "not_adopted"),
    [
        ([("explore", RING, 3), ("promote", RING, 4)], RING, ""),
        ([("promote", SIMPLE, 2), ("explore", RING, 4), ("promote", RING, 5)], SIMPLE, str(RING)),
        ([("promote", RING, 2), ("rollback", BASELINE, 9)], BASELINE, ""),
    ],
)
def test_what_ran_on_trial_is_in_force_without_another_plan(tmp_path: Path, decisions, setting, not_adopted):
    path = written(tmp_path / "s.db", *(decided(kind, one, "so", at) for kind, one, at in decisions), highest_epoch=3)
    (told,) = explanations.explain(path, None, None, None, None)
    assert (told.setting, told.not_adopted) == (str(setting), not_adopted)


def test_keys_of_which_nothing_was_decided_yet_show_what_is_known_and_expected(tmp_path: Path, monkeypatch, capsys):
    block = np.concatenate([measured(3, is_default=True), measured(2, candidate=PAT)])
    path = written(tmp_path / "s.db", block=block)
    told = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert len(told) == 1
    assert (told[0]["decision"], told[0]["setting"], told[0]["is_guess"]) == (None, "baseline", True)
    alternatives = {one["candidate"]: one for one in told[0]["alternatives"]}
    assert len(alternatives) > 5
    assert alternatives["baseline"]["n_this_job"] == 3
    assert alternatives["baseline"]["predicted_low_us"] < alternatives["baseline"]["predicted_high_us"]
    assert alternatives[str(PAT)]["n_this_job"] == 2, "measured, though NCCL does not offer it on one node"
    assert "setting guessed" in explained(monkeypatch, capsys, "--store", str(path), "--message-bytes", "1048576")


def test_a_damaged_model_does_not_keep_explain_from_reading(tmp_path: Path, monkeypatch, capsys):
    from zerotune.tuner.modeling.trainer import versions

    path = written(tmp_path / "s.db", block=measured(3, is_default=True))
    with Store.open(path) as opened:
        opened.save_model(ModelRecord("kriging", "fabric", b"junk", versions("kriging"), "0" * 24, 0.1, 1.0))
        opened.flush()
    assert "predictions by NCCL's cost" in explained(monkeypatch, capsys, "--store", str(path), "--all")
    with Store.open(path, read_only=True) as opened:
        assert [one.name for one in opened.models()] == ["kriging"], "reading changes nothing"


def test_what_ran_without_having_been_weighed_is_evidence_too(tmp_path: Path, monkeypatch, capsys):
    """Such as settings with fewer channels, in windows of another plan."""
    few = Candidate(Algorithm.ring, Protocol.ll128, 2)
    last = decided("promote", RING, "measured 5 % faster than baseline", 3)
    path = written(tmp_path / "s.db", last, block=np.concatenate([measured(4), measured(6, candidate=few)]))
    text = explained(monkeypatch, capsys, "--store", str(path), "--all")
    assert f"{few} - 50.0 (6) 50.0 (6)" in text


def test_a_job_that_did_not_train_is_not_said_to_have_run_nccls_choice(tmp_path: Path, monkeypatch, capsys):
    with Store.open(tmp_path / "s.db") as opened:
        opened.record_job("sweep-1", "fabric", {}, 2)
        opened.record_measurements("fabric", "sweep-1", measured(4))
        opened.flush()
    assert json.loads(explained(monkeypatch, capsys, "--store", str(tmp_path / "s.db"), "--json")) == []
    assert "baseline" not in explained(monkeypatch, capsys, "--store", str(tmp_path / "s.db"))


@pytest.mark.parametrize("clock_jump_s", [10.0, -10.0, -1e8])
def test_what_an_earlier_daemon_decided_is_in_force_no_longer(tmp_path: Path, monkeypatch, capsys, clock_jump_s: float):
    """The next one plans with what it knows itself; what measurements prove comes back as a decision of its own."""
    other = msgspec.structs.replace(KEY, size_class=84)

    def at(now_s: float, decision: Decision) -> Decision:
        return msgspec.structs.replace(decision, decided_at_s=now_s)

    news = "another daemon took over"
    path = written(
        tmp_path / "s.db",
        at(1e9, decided("promote", RING, "measured 0.8 % faster than baseline", 3)),
        at(1e9, decided("promote", SIMPLE, "measured 20 % faster than baseline", 3, key=other)),
        at(1e9 + clock_jump_s, decided("prior", SIMPLE, "measured before: 20 % faster", 4, key=other)),
        at(1e9 + clock_jump_s, decided("takeover", BASELINE, news, 4)),
    )
    told = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert [one["setting"] for one in told] == ["baseline", str(SIMPLE)]
    assert told[0]["decision"] is None
    assert len(told[0]["history"]) == 1
    text = explained(monkeypatch, capsys, "--store", str(path), "--all")
    assert f"step 40, epoch 4: {news}" in text


def test_the_head_names_the_job_the_fabric_the_communicators_and_the_emulation(tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "s.db"
    with Store.open(path) as opened:
        for job, fabric, facts in (("made", "boxes-1", {"emulated": "boxes"}), ("real", "gpus", {"gpu": "H200"})):
            opened.record_job(job, fabric, facts, 16)
            for place in (CommunicatorClass(16, 2), PLACE):
                key = msgspec.structs.replace(KEY, communicator=place)
                opened.record_decisions([Decision(job, fabric, key, BASELINE, 1, "keep", "so")])
        opened.record_job("bare", "", {}, 2)
        opened.flush()
    places = "2 ranks on 1 node; 16 ranks on 2 nodes"
    heads = {
        "made": f"Job made on fabric boxes-1 (NCCL emulated as boxes: times are a virtual clock's): {places}",
        "real": f"Job real on fabric gpus: {places}",
        "bare": "Job bare on an unknown fabric: nothing measured",
    }
    for job, head in heads.items():
        for words in ([], ["--phase", "other"]):
            assert explained(monkeypatch, capsys, "--store", str(path), "--job", job, *words).strip().startswith(head)
    told = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--job", "made", "--json"))
    assert [one["job"].pop("gain")["kind"] for one in told] == ["unknown"] * 2
    assert [one["job"] for one in told] == [
        {
            "job_id": "made",
            "fabric_id": "boxes-1",
            "emulated": "boxes",
            "n_ranks": 16,
            "communicators": [{"n_ranks": 2, "n_nodes": 1}, {"n_ranks": 16, "n_nodes": 2}],
            "stage": "unknown",
            "missing_evidence": "no_collectives",
            "name": "",
            "baseline": "",
            "lateness": {"n_steps": 0, "wait_us": 0.0, "transfer_us": 0.0, "late": [], "slow": [], "past": []},
            "misaligned": [],
            "n_damaged": 0,
            "n_impossible_times": 0,
        }
    ] * 2


@pytest.mark.parametrize(("n_ran", "n_own"), [(3, 0), (2, 1)])
def test_counts_that_come_to_the_same_are_one_line(tmp_path: Path, n_ran: int, n_own: int):
    """Of 4 channels asked for 3 run at 8,256 bytes: what earlier jobs measured stands under what was asked for."""
    key = msgspec.structs.replace(KEY, size_class=size_class(8256))
    asked, own = Candidate(Algorithm.ring, Protocol.ll, 4), Candidate(Algorithm.ring, Protocol.ll, 2)
    path = tmp_path / "s.db"
    with Store.open(path) as opened:
        for job in ("first", "second"):
            opened.record_job(job, "fabric", {}, 2)
            opened.record_steps(job, [StepRecord(step, 0, 1000.0) for step in range(20)])
            lines = [weighed(one) for one in (BASELINE, asked, *([own] * n_own))]
            alternatives = json.dumps(lines)
            opened.record_decisions([Decision(job, "fabric", key, asked, 1, "prior", "so", alternatives=alternatives)])
        ran = Candidate(Algorithm.ring, Protocol.ll, n_ran)
        opened.record_measurements("fabric", "first", measured(2, 8256, ran))
        opened.record_measurements("fabric", "first", measured(4, 8256, BASELINE_RAN, is_default=True))
        opened.flush()
    (one,) = explanations.explain(path, "second", None, None, None)
    counts = {line["candidate"]: line["n_all_jobs"] for line in one.alternatives}
    named = own if n_own else asked
    assert counts == {"baseline": 4, "ring/ll/4ch": 0, str(named): 2}
    with Store.open(path, read_only=True) as opened:
        decision, everywhere = opened.decisions(job_id="second")[0], medians(opened.statistics("fabric"))
    assert compare(decision, {}, everywhere).is_measured == (named == asked)
