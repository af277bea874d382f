"""What people type by mistake: one line names the value and what to do, and nothing is started or left behind.

`test_every_command.py` has more mistakes, of each command, and asks less of the words.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.command_line import zerotune

MISTAKES = [
    # What is typed; words of the message: the value, and the remedy.
    ("lanuch -- torchrun train.py", "'lanuch'", "Did you mean 'launch'?"),
    ("train torchrun train.py", "'train'", "see `zerotune --help`"),
    ("--verbose", "--verbose", "--version"),
    ("status extra", "(extra)", "see `zerotune status --help`"),
    ("daemon start", "'start'", "see `zerotune daemon --help`"),
    ("launch", "'COMMAND'", "for example `zerotune launch -- torchrun train.py`"),
    ("launch --", "'COMMAND'", "for example `zerotune launch -- torchrun train.py`"),
    ("launch -- t.py", "'t.py' is a script", "`python t.py`"),
    ("launch -- no-such-program train.py", "'no-such-program'", "PATH"),
    ("launch --fabrics ethernet_boxes -- true", "--fabrics", "--fabric"),
    ("launch --fabric ethernet_box -- true", "'ethernet_box'", "ethernet_boxes"),
    ("launch --fabric nowhere/mine.toml -- true", "nowhere/mine.toml", "check the path"),
    ("launch --budget-percent abc -- true", "'abc' is no number", "write one, or 1% for a hundredth"),
    ("launch --daemon --memory-threshold 92 -- true", "92 is no share", "give 0.92"),
    ("launch --nccl-memory-mb lots -- true", "'lots' is no size", "16MB"),
    ("launch --numerics bitwise -- true", "'bitwise'", "'any', 'exact'; see"),
    ("launch --tune-for -5 -- true", "--tune-for", "--tune-for -5 is too small; give 1 or more"),
    ("launch --plan nowhere.json -- true", "nowhere.json", "`zerotune store export`"),
    ("launch --plan newer.json -- true", "plan version 99", "write it again"),
    ("launch --plan junk.log -- true", "junk.log is no plan file", "`zerotune store export` wrote"),
    ("launch --store nowhere/store.db -- true", "no folder {work}/nowhere", "make the folder, or correct the path"),
    ("launch --store junk.log -- true", "junk.log is no zerotune store", "name another store"),
    ("launch --store \udcff.db -- true", "is no UTF-8", "name another with --store"),
    ("launch --curve-keys nowhere -- true", "no folder of keys at nowhere", "`zerotune daemon keys nowhere`"),
    ("launch --endpoint localhost:5577 -- true", "'localhost:5577'", "ipc:// nor tcp://"),
    ('launch --name "" -- true', "--name is empty", "give one, or leave it out"),
    ("demo --steps -5", "--steps -5 is too small", "give 8 or more"),
    ("demo --fabric h100", "'h100'", "h100_node"),
    ("jobs --store nowhere.db", "no store at {work}/nowhere.db", "name another store"),
    ("explain --trace nowhere", "nowhere does not exist", "name a trace file"),
    ("report report.pdf", "report.pdf", "ends in .html"),
    ("report --plot winner", "'winner'", "winners"),
    ("predict dgx_h1000", "'dgx_h1000'", "dgx_h100"),
    ("predict dgx_h100 --nodes two", "'two'", "1,2,4,8"),
    ("predict --sizes 1M-64M", "'1M-64M'", "1K:1G"),
    ("advise 7.5X", "'7.5X'", "7.5B"),
    ("advise 7.5B --fabric dgx_h1000", "'dgx_h1000'", "dgx_h100"),
    ("advise 7.5B --gpu H100", "'H100'", "h100_80gb"),
    ("advise 7.5B --picture advice.pdf", ".pdf", "use .png or .svg"),
    ("replay nowhere", "nowhere does not exist", "name a trace file"),
    ("replay . --policy best", "'best'", "oracle"),
    ("sweep --ranks 1", "1 rank", "--ranks 2 or more"),
    ("sweep --chunk-bytes 64K", "without --full", "add --full"),
    ("sweep --full --chunk-bytes 1K", "chunk_bytes 1024", "64KiB"),
    ("sweep --full --chunk-bytes 0", "less than one byte", "16MiB"),
    ("sweep --full --chunk-bytes 64K --fabric h100_node", "does not say what chunk sizes", "--fabric out"),
    ("sweep --min-bytes 1M --max-bytes 1K", "1,048,576 to 1,024", "a larger --max-bytes"),
    ("daemon --metrics 9464", "'9464'", "127.0.0.1:9464"),
    ("daemon --book fleet.book", "--book", "--book-key"),
    ("daemon metrics --serve 127.0.0.1:{port}", "127.0.0.1:{port}", "another"),
    ("status --web --listen 127.0.0.1:{port}", "127.0.0.1:{port}", "another"),
    ("hardware add mine --topology nowhere.xml", "nowhere.xml", "NCCL_TOPO_DUMP_FILE"),
    ("hardware remove mine", "'mine'", "there are: none"),
    ("store import junk.log", "junk.log is no trace", "--format"),
    ("store export plan.csv", ".csv", ".json"),
    ("store export plan.json --to nccl", "'nccl'", "nvidia-csv"),
]


@pytest.fixture
def port() -> Iterator[int]:
    """That another program has."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize(("typed", "value", "remedy"), MISTAKES, ids=[typed for typed, *_ in MISTAKES])
def test_a_mistake_is_named_with_its_remedy(
    typed: str, value: str, remedy: str, port: int, short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    for name in ("os.execvpe", "zerotune.tuner.client.background_daemon.subprocess.Popen"):
        monkeypatch.setattr(name, never)
    for name in ("ZEROTUNE_STORE", "ZEROTUNE_ENDPOINT", "ZEROTUNE_CURVE_KEYS", "NCCL_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_DATA_HOME", "XDG_STATE_HOME", "ZEROTUNE_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(short_folder / name.lower()))
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    (work / "newer.json").write_text('{"zerotune_plan": 99, "rows": []}')
    (work / "junk.log").write_text("junk\n")
    before = {*work.iterdir()}
    said = zerotune(*shlex.split(typed.format(port=port)))
    assert (said.code, said.out) == (2, ""), said
    assert said.err.startswith("zerotune: ")
    assert said.err.count("\n") == 1
    assert value.format(work=work, port=port) in said.err
    assert remedy in said.err
    assert {*work.iterdir()} == before
