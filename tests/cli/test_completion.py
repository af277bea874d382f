"""Shell completion: of commands, and of the values of options, where nothing may ever fail."""

from __future__ import annotations

import sys

import pytest

from zerotune.store.sqlite.database import Store
from zerotune.tuner import cli


def completed(monkeypatch, capsys, *words: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["zerotune"])
    monkeypatch.setenv("_ZEROTUNE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(("zerotune", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit):
        cli.main()
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("la",), ["launch"]),
        (("store", "ba"), ["backup"]),
        (("launch", "--fab"), ["--fabric"]),
        (("launch", "--fabric", "ethernet"), ["ethernet_boxes"]),
        (("sweep", "--collective", "all_"), ["all_gather", "all_reduce"]),
        (("explain", "--phase", "forward"), ["forward_gather"]),
        (("replay", "x", "--policy", "th"), ["thompson"]),
        (("advise", "--memory", "--precision", "f"), ["fp32", "fp16"]),
        (("advise", "--memory", "--optimizer", "radam"), ["radam"]),
        (("store", "import", "x", "--format", "kin"), ["kineto"]),
        (("explain", "--store", "/nowhere/s.db", "--job", ""), []),
    ],
)
def test_the_shell_is_offered_completions(words, offered, monkeypatch, capsys):
    assert completed(monkeypatch, capsys, *words) == offered


def test_jobs_and_fabrics_of_the_store(monkeypatch, capsys, tmp_path):
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("job-1", "fabric-1", {}, 2)
        store.flush()
    at = ("--store", str(tmp_path / "s.db"))
    assert completed(monkeypatch, capsys, "explain", *at, "--job", "") == ["job-1"]
    assert completed(monkeypatch, capsys, "store", "models", *at, "--fabric-id", "fab") == ["fabric-1"]
