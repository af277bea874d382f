"""What `zerotune explain` prints: what figures mean, what is in force and why, and what there is where nothing fits."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

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
    StepRecord,
    size_class,
)
from zerotune.store.records.passages import OtherPlugin, Passages
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner import cli
from zerotune.tuner.offline import explaining
from zerotune.tuner.offline.jobs.listing import list_jobs
from zerotune.tuner.offline.report.facts import gather

PLACE = CommunicatorClass(2, 1)
KEY = DecisionKey(PLACE, Collective.all_gather, Phase.forward_gather, size_class(1 << 20))
RING, SIMPLE, PAT = (
    Candidate(Algorithm.ring, Protocol.ll, 8),
    Candidate(Algorithm.ring, Protocol.simple, 4),
    Candidate(Algorithm.pat, Protocol.simple, 4),
)


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
    monkeypatch.setenv("COLUMNS", "160")
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


def test_explain_and_jobs_tell_one_gain(tmp_path: Path, monkeypatch, capsys):
    path, own_setting = tmp_path / "s.db", Candidate(Algorithm.ring, Protocol.simple, 1)
    own, tuned = (measured(20, 1 << 20, ran, step=range(at, at + 20), duration_us=us, is_default=ran == own_setting)
                  for ran, at, us in ((own_setting, 0, 400.0), (RING, 20, 200.0)))  # fmt: skip
    with Store.open(path) as opened:
        opened.record_job("job", "fabric", {}, 2)
        windows = {step: 2 + step // 12 for step in range(36, 140) if step % 12 < 2}
        epochs = [0] * 20 + [windows.get(step, 1) for step in range(20, 140)]
        opened.record_steps("job", [StepRecord(at, one, 600.0 if one == 1 else 800.0) for at, one in enumerate(epochs)])
        opened.record_decisions([decided("promote", RING, "faster", 1)])
        opened.record_decisions([decided("control", BASELINE, "a window", one) for one in {*windows.values()}])
        opened.record_measurements("fabric", "job", np.concatenate([own, tuned]))
        opened.flush()
    (one,) = explaining.explain(path, None, None, None, None)
    (line,) = list_jobs(path, limit=1)
    assert (one.saved_us, one.saved_percent) == (200.0, pytest.approx(25.0))
    assert one.saved_percent == pytest.approx(line.gain.saved_percent)
    assert one.job.gain == line.gain
    words = explained(monkeypatch, capsys, "--store", str(path))
    assert words.count("+200 us (+25.0 %)") == 3, "of the key, of all calls, and of whole steps"


def test_a_trial_that_no_step_ran_under_is_none(tmp_path: Path, monkeypatch, capsys):
    path = written(
        tmp_path / "s.db", decided("explore", SIMPLE, "hope", 1), decided("explore", RING, "hope", 2), highest_epoch=1
    )
    (told,) = json.loads(explained(monkeypatch, capsys, "--store", str(path), "--json"))
    assert (told["n_explored"], told["is_trial_to_come"]) == (1, True)
    assert gather(path).n_explored() == 1


def test_a_decision_that_no_step_ran_under_is_not_in_force(tmp_path: Path, monkeypatch, capsys):
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
def test_a_trial_may_come_into_force_without_another_plan(tmp_path: Path, decisions, setting, not_adopted):
    path = written(tmp_path / "s.db", *(decided(kind, one, "so", at) for kind, one, at in decisions), highest_epoch=3)
    (told,) = explaining.explain(path, None, None, None, None)
    assert (told.setting, told.not_adopted) == (str(setting), not_adopted)


@pytest.mark.parametrize("clock_jump_s", [10.0, -10.0, -1e8])
def test_decisions_of_an_earlier_daemon_are_out_of_force(tmp_path: Path, monkeypatch, capsys, clock_jump_s: float):
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
            "frozen_since": 0,
            "in_shadow": "",
        }
    ] * 2
