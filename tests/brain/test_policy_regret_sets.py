"""What `policy_regret.py` may be asked to judge on, and sweeps of few keys to judge on."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import generated_csvs
import policy_regret

from agent.nccl import fabric


def test_a_name_that_no_data_set_has_is_answered_with_the_names_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["policy_regret.py", "--only", "nosuch", "--generated", "1"])
    with pytest.raises(SystemExit) as ended:
        policy_regret.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("--only nosuch", *fabric.names(), "generated_1000"))


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
