"""What `policy_regret.py` may be asked to judge on, and sweeps of few keys to judge on."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from benchmarks.lib import generated_csvs
from benchmarks.policy import policy_regret
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
