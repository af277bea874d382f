"""What shares across nodes needs an extra; who lacks it is told its name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zerotune.store.errors import UserError
from zerotune.tuner.cli.app import app


@pytest.mark.parametrize(
    "words",
    [
        ["store", "book", "key", "book.key"], ["store", "book", "build", "fleet"],
        ["store", "book", "show", "fleet.book"], ["store", "book", "diff", "one.book", "other.book"],
        ["advise", "1B", "--measured", "fleet.book"],
        ["store", "export", "plan.json", "--to", "plan", "--book", "fleet.book"],
    ],
)  # fmt: skip
def test_without_the_extra_its_name_is_told(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("zerotune.tuner.fleet.find_spec", lambda name: None if name == "cryptography" else find(name))
    monkeypatch.chdir(tmp_path)
    Path("fleet.book").write_bytes(b'{"zerotune_book":1}\n')
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError)
    assert "[fleet]" in done.exception.remedy


def test_a_key_is_made_with_what_it_takes_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find, absent = importlib.util.find_spec, ("pyarrow", "duckdb", "fsspec")
    monkeypatch.setattr("zerotune.tuner.fleet.find_spec", lambda name: None if name in absent else find(name))
    done = CliRunner().invoke(app, ["store", "book", "key", str(tmp_path / "book.key"), "--json"])
    assert done.exit_code == 0
    assert len(json.loads(done.stdout)["key"]) == 64
