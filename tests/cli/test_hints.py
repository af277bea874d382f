"""Where something is missing, commands say what it is and where it may be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zerotune.tuner import cli


def said(monkeypatch, capsys, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["zerotune", *map(str, words)])
    with pytest.raises(SystemExit):
        cli.main()
    captured = capsys.readouterr()
    return captured.out + captured.err


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_a_folder_is_no_command(tmp_path: Path, monkeypatch, capsys):
    assert str(tmp_path) in said(monkeypatch, capsys, "launch", "--no-agent", "--", tmp_path)


def test_metrics_of_a_store_that_is_not_there_is_a_mistake(tmp_path: Path, monkeypatch, capsys):
    told = said(monkeypatch, capsys, "metrics", "--store", tmp_path / "none.db", "--endpoint", f"ipc://{tmp_path}/d")
    assert str(tmp_path / "none.db") in unwrapped(told)
