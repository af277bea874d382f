"""What `policy_regret.py` may be asked to judge on, and sweeps of few keys to judge on."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from benchmarks.lib.data import generated_csvs
from benchmarks.policy import policy_regret, recorded_figures
from zerotune.agent.nccl import fabric


def test_a_name_that_no_data_set_has_is_answered_with_the_names_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["policy_regret.py", "--only", "nosuch", "--generated", "1"])
    with pytest.raises(SystemExit) as ended:
        policy_regret.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("--only nosuch", *fabric.names(), "generated_1000"))


@pytest.mark.parametrize("option", ["--draws", "--generated", "--seed"])
def test_a_negative_count_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["policy_regret.py", option, "-1", "--only", "nosuch"])
    with pytest.raises(SystemExit) as ended:
        policy_regret.main()
    assert ended.value.code == 2
    assert f"argument {option}: '-1' " in capsys.readouterr().err


def test_data_of_nccls_own_choice_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    header = "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,latency_us"
    (tmp_path / "own.csv").write_text(f"{header}\nallgather,65536,default,default,-1,2,16,33.9\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["policy_regret.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        policy_regret.main()
    assert ended.value.code == 2
    assert f"--data {tmp_path}" in capsys.readouterr().err


def test_a_machine_may_be_measured_at_few_keys(tmp_path: Path) -> None:
    written = {}
    for n_keys in (2, None):
        path = tmp_path / f"{n_keys}.csv"
        generated_csvs.write(path, 7, 0.03, (4,), n_keys)
        with path.open(newline="", encoding="utf-8") as file:
            written[n_keys] = {(row["collective"], row["size_bytes"]) for row in csv.DictReader(file)}
    assert len(written[2]) == 2
    assert len(written[None]) == len(generated_csvs.NAMES) * len(generated_csvs.SIZES)
    assert written[2] < written[None]


def test_what_is_kept_aside_is_judged_beside_the_others_where_asked_for_and_never_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy_regret, "is_kept_aside", lambda name: name == "aside")
    monkeypatch.setattr(policy_regret, "N_CALLS", recorded_figures.JUDGED_CALLS + recorded_figures.WINDOW_STEPS)
    for seed, name in enumerate(("aside", "other")):
        generated_csvs.write(tmp_path / f"{name}.csv", seed, 0.03, (4,), 1)
    metrics = {}
    for option in [], ["--sealed"]:
        words = [
            "policy_regret.py",
            "--data",
            str(tmp_path),
            "--recorded-only",
            "--ours-only",
            "--calls",
            "8",
            "--json",
        ]
        monkeypatch.setattr(sys, "argv", [*words, *option])
        policy_regret.main()
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        metrics[bool(option)] = {one["metric"] for one in document["results"]}
    assert not any(name.startswith("sealed_") or "aside" in name for name in metrics[False])
    assert "recorded_regret_mean" in metrics[False]
    of_aside = metrics[True] - metrics[False]
    assert {"sealed_recorded_regret_mean", "sealed_budget_worst_window"} <= of_aside
    assert {name.replace("other", "aside") for name in metrics[False] if "@" in name} == {
        name.removeprefix("sealed_") for name in of_aside if "@" in name
    }
