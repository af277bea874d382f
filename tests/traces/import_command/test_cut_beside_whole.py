"""Of several files, the one that was cut or damaged is named first, by whatever command reads them."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trace_samples as samples

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.cli import main

Told = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Runs a command here: exit code, and the lines that it printed."""

    def run(*words: object) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["zerotune", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        code = int(ended.value.code or 0)
        return code, (printed.err if code else printed.out).splitlines()

    return run


def test_of_every_format(tmp_path: Path, told: Told) -> None:
    draw = random.Random(11)
    (tmp_path / "whole").mkdir()
    for name, whole in samples.everything(tmp_path / "whole").items():
        content = whole.read_bytes()
        at = draw.randrange(len(content) // 4, len(content))
        while content[at - 1 : at + 1].count(b"\n"):  # a file that ends with a line may be whole
            at -= 1
        folder = tmp_path / name
        folder.mkdir()
        cut = folder / f"cut_{whole.name}"
        cut.write_bytes(content[:at])
        alone = told("import", cut, "--dry-run")
        assert cut.name in alone[1][0], name
        assert len(alone[1]) == 1 or alone[0] == 0
        shutil.copy(whole, folder / f"whole_{whole.name}")
        code, lines = told("import", folder, "--dry-run")
        assert (code, cut.name in lines[0]) == (0, True), name
        code, lines = told("stage", "test", folder)
        assert (code, cut.name in lines[0]) == (0, True), name


@pytest.mark.parametrize("damage", ["cut", "overwritten", "empty", "foreign"])
def test_of_our_own_ranks_files(tmp_path: Path, told: Told, damage: str) -> None:
    rows = np.ones(400, OBSERVATION_FIELDS)
    rows["sequence"], rows["message_bytes"], rows["n_ranks"], rows["flags"] = np.arange(400), 4096, 3, 2
    for rank in range(3):
        log = TraceLog(tmp_path, job_id="j", rank=rank, n_ranks=3, fabric_id="", fabric={}, version="0")
        rows["rank"], rows["duration_us"] = rank, np.random.default_rng(rank).random(400)
        log.record(rows)
        log.flush()
        log.record(rows)
        log.close()
    file = sorted(tmp_path.iterdir())[1]
    content, half = file.read_bytes(), file.stat().st_size // 2
    file.write_bytes(
        {
            "cut": content[:half],
            "overwritten": content[:half] + b"\xff" * 64 + content[half + 64 :],
            "empty": b"",
            "foreign": b"\xff" * 64 + content[64:],
        }[damage]
    )
    code, lines = told("import", tmp_path, "--dry-run")
    assert (code, file.name in lines[0]) == (0, True)
    code, lines = told("replay", tmp_path)
    assert (code, file.name in "".join(lines[1:4])) == (0, True), "what it is about comes first"
    code, lines = told("stage", "test", file)
    assert (code, file.name in lines[0]) == (0 if damage == "cut" else 2, True)
