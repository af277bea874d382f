"""Earlier names of commands and options: they work for one release more, and the new name is said."""

from __future__ import annotations

import pytest

from benchmarks.lib.command_line import zerotune
from zerotune.tuner.cli.renamed import COMMANDS, renamed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("top --once", "status --watch --once"),
        ("plot winners w.svg --job a", "report w.svg --job a --plot winners"),
        ("nccl list", "hardware"),
        ("nccl dgx_h100 --nodes 2", "predict dgx_h100 --nodes 2"),
        ("nccl dgx_h100 --min-bytes 64K --max-bytes 1M", "predict dgx_h100 --sizes 64K:1M"),
        ("nccl dgx_h100 --max-bytes=1M", "predict dgx_h100 --sizes 1K:1M"),
        ("memory --model 7B --ranks 8", "advise --memory 7B --ranks 8"),
        ("advise 7.5B --machine p4d", "advise 7.5B --fabric p4d"),
        ("hardware add mine --nccl=libnccl.so.2", "hardware add mine --library=libnccl.so.2"),
        ("models list", "store models"),
        ("stage test traces", "explain --trace traces"),
        ("import x.log --n-nodes=2", "store import x.log --nodes=2"),
        ("launch --start-daemon -- top --start-daemon", "launch --daemon -- top --start-daemon"),
    ],
)
def test_old_names_stand_for_new_ones(before: str, after: str) -> None:
    words, told = renamed(before.split())
    assert " ".join(words) == after
    assert told


def test_todays_names_are_left_alone() -> None:
    for words in ([], ["status"], ["launch", "--", "plot", "--n-ranks"], ["store", "export", "a.json"]):
        assert renamed(words) == (words, "")


def test_the_new_name_is_said_and_json_stays_clean() -> None:
    done = zerotune("fabrics", "--json")
    assert (done.code, done.err) == (0, "zerotune: `zerotune fabrics` is `zerotune hardware --json` now\n")
    assert done.out.startswith("{")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_old_name_has_help(name: str) -> None:
    assert zerotune(name, "--help").code == 0


def test_help_is_a_command() -> None:
    assert zerotune("help", "launch").out == zerotune("launch", "--help").out
    assert zerotune("-V").out == zerotune("--version").out
