"""What holds for every command: help with an example, JSON for scripts, one line and exit code 2 for mistakes.

A command that is missing from the tables below fails the first test.
"""

from __future__ import annotations

import json
import sys
from unittest.mock import Mock

import pytest
from typer.main import get_command

from zerotune.store.records import BASELINE, Collective, CommunicatorClass, Decision, DecisionKey, Phase, StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner import cli
from zerotune.tuner.cli.app import app

NO_JSON = {"daemon", "launch", "demo"}
"""Commands that run something."""
JSON_ELSEWHERE = {
    "daemon stop",
    "store book key",
    "store book build",
    "store book show",
    "store book diff",
    "hardware add",
    "hardware remove",
}
"""Commands with --json that need minutes, a daemon, a fleet, or NCCL's library."""

MISTAKES = {
    "daemon": [
        ["--endpoint", "nonsense"],
        ["--store", "{none}/s.db"],
        ["--endpoint", "ipc:///tmp/zt-{pid}/d.sock", "--metrics", "nonsense"],
        *[["--idle-exit", value] for value in ("soon", "0", "nan")],
        ["--retention-days", "nan"],
        *[["--budget-percent", value] for value in ("much", "101", "nan")],
        *[["--memory-threshold", value] for value in ("0", "nan")],
        ["--no-explore", "--budget-percent", "1"],
        ["--curve-keys", "{none}"],
        ["--book", "{junk}"],
        ["--book-key", 64 * "0"],
        ["--book", "{junk}", "--book-key", "00"],
        *[["--fleet", url] for url in ("nonsense://x", "https://example.org/fleet")],
    ],
    "launch": [
        ["--plan", "{empty}", "--", "true"],
        ["--plan", "{folder}", "--", "true"],
        ["--plan", "{huge}", "--", "true"],
        ["--log-trace", "", "--", "true"],
        ["--nccl-memory-mb", "inf", "--", "true"],
        *[["--name", name, "--", "true"] for name in (5000 * "x", " x", "a\x1bb", "a\u202eb")],
        ["--daemon", "--no-explore", "--budget-percent", "1", "--", "true"],
        *[["--no-agent", "--summary", path, "--", "true"] for path in ("{folder}", "{none}/s.json", "/proc/s.json")],
    ],
    "status": [
        *[["--endpoint", where] for where in ("ipc:///nowhere/d.sock", "nonsense")],
        ["--watch", "--endpoint", "ipc:///nowhere/d.sock"],
        *[["--watch", "--interval", value] for value in ("0", "nan", "soon")],
        ["--curve-keys", "{none}"],
        ["--watch", "--web"],
        ["--web", "--endpoint", "nonsense"],
        *[["--web", "--listen", address] for address in ("8470", "here:", "127.0.0.1:99999", "256.0.0.1:1")],
        ["--web", "--no-token", "--listen", "0.0.0.0:0"],
        ["--web", "--no-token", "--listen", "node-7:8470"],
    ],
    "daemon stop": [["--endpoint", "ipc:///nowhere/d.sock"], ["--endpoint", "nonsense"]],
    "jobs": [["--store", "{none}"], ["--store", "{junk}"], ["--limit", "0"], ["--limit", "many"]],
    "explain": [
        *[["--store", "{none}"], ["--store", "{junk}"], ["--store", "{store}", "--job", "nobody"]],
        *[["--trace", path] for path in ("{none}", "{empty}", "{junk}")],
    ],
    "predict": [
        *[["--store", store] for store in ("{none}", "{junk}")],
        *[["--store", "{store}", "--nodes", nodes] for nodes in ("0", "1,,2", "99999999999")],
        *[["--store", "{store}", "--sizes", sizes] for sizes in ("1G:1K", "0", "1K:")],
        ["--store", "{store}", "--collective", "nothing"],
        ["--store", "{store}", "--ranks-per-node", "0"],
        ["--fabric", "nope"],
        ["--fabric", "few_sms_node", "--nodes", "2", "--store", "{none}"],
        ["--fabric", "h100_node", "--nodes", "1", "--ranks-per-node", "9", "--store", "{none}"],
        ["dgx_h100", "--library", "{junk}"],
        ["dgx_h100", "--library", "/nowhere/libnccl.so.2"],
        ["nowhere", "--library", "{junk}"],
        ["{junk}", "--library", "{junk}"],
        ["dgx_h100", "--library", "{junk}", "--ranks-per-node", "9"],
        ["--picture", "x.png", "--store", "{store}"],
        ["dgx_h100", "--fabric", "h100_node", "--library", "{junk}"],
    ],
    "replay": [
        *[["{none}"], ["{empty}"], ["{junk}"], ["{huge}"], ["{folder}"], ["{junk}", "--policy", "magic"], []],
        *[["{csv}", "--plan", plan] for plan in ("{none}", "{empty}", "{junk}", "{huge}", "{folder}")],
        ["{csv}", "--bucket-mb", "nan", "--store", "{store}"],
        ["{csv}", "--bucket-mb", "inf", "--store", "{store}"],
    ],
    "sweep": [
        ["--fabric", "as_believed", "--timeout", "inf", "--store", "{out}"],
        ["--fabric", "as_believed", "--max-bytes", "99999999999999999999", "--store", "{out}"],
        ["--fabric", "as_believed", "--samples-share", "7", "--store", "{out}"],
        ["--fabric", "nope"],
        ["--fabric", "ethernet_boxes", "--collective", "gather"],
        ["--fabric", "ethernet_boxes", "--half-width", "0"],
        ["--fabric", "ethernet_boxes", "--samples-share", "-1"],
        ["--fabric", "ethernet_boxes", "--timeout", "0"],
        ["--fabric", "ethernet_boxes", "--max-repeats", "0"],
        ["--fabric", "ethernet_boxes", "--store", "{junk}"],
        ["--fabric", "ethernet_boxes", "--store", "/proc/none/s.db"],
        ["--ranks", "many"],
        ["--compare", "a", "b", "--store", "{store}"],
        ["--compare", "a", "b", "--store", "{none}"],
    ],
    "store import": [["{none}"], ["{empty}"], ["{junk}"], ["{huge}"], ["{csv}", "--setting", "ring/8"], []],
    "store book key": [["{folder}"], ["{junk}"], ["/proc/key"], []],
    "store book build": [
        ["{none}", "--out", "{out}"],
        ["nonsense://x", "--out", "{out}"],
        ["{folder}", "--sign", "{none}"],
        ["{folder}", "--memory-mb", "1"],
        [],
    ],
    "store book show": [
        *[[path] for path in ("{none}", "{empty}", "{junk}", "{folder}")],
        ["{none}", "--book-key", "00"],
        [],
    ],
    "store book diff": [["{none}", "{none}"], ["{junk}", "{junk}"], []],
    "store export": [
        ["{out}", "--store", "{none}"],
        ["{out}", "--store", "{junk}"],
        ["{folder}", "--store", "{store}"],
        ["/proc/x.json", "--store", "{store}"],
        ["/proc/x.csv", "--to", "measurements", "--store", "{store}"],
        ["/proc/x.csv", "--to", "nvidia-csv", "--store", "{store}"],
        ["{out}", "--job", "nobody", "--store", "{store}"],
        ["{out}", "--to", "chrome", "--job", "nobody", "--store", "{store}"],
        ["{out}", "--to", "chrome", "--trace", "{junk}", "--store", "{store}"],
        [],
    ],
    "advise": [
        [],
        ["1e30"],
        ["{none}/config.json"],
        ["7B", "--nodes", "0"],
        ["7B", "--ranks-per-node", "0"],
        ["7B", "--ranks-per-node", "9"],
        ["7B", "--fabric", "{junk}"],
        ["many", "--memory"],
        ["7B", "--memory", "--ranks", "0"],
        ["--memory", "--overlap", "--group", "0"],
        ["7B", "--memory", "--overlap"],
        ["7B", "--overlap"],
        ["7B", "--gpu-memory-gb", "nan"],
        ["7B", "--gpu-memory-gb", "-1"],
        ["7B", "--heads", "3"],
        ["7B", "--fabric-id", "x"],
        ["7B", "--ranks-per-node", "1", "--stage", "3"],
        ["--layers", "9", "--hidden", "1000000000000"],
        ["7B", "--precision", "int3"],
        ["7B", "--optimizer", "x"],
        ["7B", "--recompute", "twice"],
        ["7B", "--config", "jax"],
        ["7B", "--config", "fsdp2", "--json"],
        ["7B", "--batch", "7", "--model-parallel", "1"],
        ["7B", "--model-parallel", "7"],
        ["7B", "--layers", "12", "--hidden", "768"],
        ["--layers", "12"],
        ["--layers", "12", "--hidden", "768", "--heads", "7"],
        ["900B"],
        ["7B", "--picture", "/proc/x.svg"],
        *[["7B", "--measured", path] for path in ("{none}", "{empty}", "{junk}", "{folder}", "{store}")],
        ["7B", "--measured", "{store}", "--job", "nobody"],
        *[["7B", "--measured", "{store}", "--ran", ran] for ran in ("much", "stage=7", "batch=0", "stage=3")],
        ["7B", "--ran", "stage=3"],
        *[["7B", "--watch", "--ran", "stage=3", "--measured", path] for path in ("{none}", "{junk}", "{folder}")],
        ["7B", "--watch", "--ran", "stage=3", "--measured", "{store}", "--job", "nobody"],
        ["7B", "--picture", "{out}"],
        *[[path] for path in ("{none}", "{empty}", "{junk}", "{huge}", "{folder}")],
    ],
    "report": [
        ["{folder}", "--store", "{store}"],
        ["/proc/x.html", "--store", "{store}"],
        ["x.png", "--store", "{store}"],
        ["--plot", "timeline", "--store", "{store}"],
        ["{out}", "--plot", "steps", "--store", "{store}"],
        ["/proc/x.png", "--plot", "steps", "--store", "{store}"],
        ["--plot", "steps", "--store", "{none}"],
        ["{out}", "--store", "{none}"],
        ["{out}", "--store", "{junk}"],
        ["{out}", "--store", "{store}", "--trace", "{junk}"],
        ["{out}", "--store", "{store}", "--summary", "{junk}", "--summary", "{none}"],
        ["{out}", "--store", "{store}", "--summary", "{huge}", "--summary", "{huge}"],
        ["{out}", "--store", "{store}", "--trace", "{csv}", "--trace", "{csv}", "--trace", "{csv}"],
    ],
    "daemon metrics": [
        ["--store", "{junk}"],
        ["--serve", "nonsense"],
        ["--serve", "256.0.0.1:1"],
        ["--dashboard", "/proc/d.json"],
    ],
    "hardware": [["--bogus"]],
    "hardware add": [
        ["h100_node", "--topology", "{junk}"],
        ["../mine", "--topology", "{junk}"],
        *[["mine", "--topology", path] for path in ("{empty}", "{junk}", "{huge}", "{folder}")],
        ["mine", "--topology", "{junk}", "--library", "{none}"],
        ["mine"],
        [],
    ],
    "hardware remove": [["h100_node"], []],
    "doctor": [
        ["--endpoint", "nonsense"],
        ["--curve-keys", "{none}"],
        ["--store", "{folder}"],
        ["--nodes"],
        ["--nodes", "--", "{none}"],
        ["--nodes", "--", "{junk}"],
        ["srun"],
    ],
    "daemon keys": [["{junk}"], ["/proc/keys"], [""], []],
    "demo": [
        ["--out", ""],
        ["--out="],
        ["--out", "{junk}"],
        ["--out", "/proc/run"],
    ],
    "store models": [["--store", "{none}"], ["--store", "{junk}"]],
    "store backup": [
        *[["{out}", "--store", store] for store in ("{none}", "{empty}", "{junk}")],
        *[[out, "--store", "{store}"] for out in ("{folder}", "{junk}", "{store}", "/proc/copy.db", "{none}/copy.db")],
        ["{store}", "--store", "{store}", "--force"],
        ["/dev/null", "--store", "{store}", "--force"],
        [],
    ],
    "store check": [
        *[[path] for path in ("{none}", "{empty}", "{junk}", "{huge}", "{folder}")],
        ["--store", "{none}"],
        ["{store}", "--store", "{store}"],
    ],
    "store repair": [
        *[[path] for path in ("{none}", "{empty}", "{junk}", "{huge}", "{folder}")],
        ["--store", "{junk}"],
        ["{store}", "--store", "{store}"],
    ],
}

AS_JSON = {
    "status": ["--endpoint", "{daemon}"],
    "jobs": ["--store", "{store}"],
    "explain": ["--store", "{store}"],
    "predict": ["--store", "{store}"],
    "replay": ["{csv}", "--store", "{store}"],
    "sweep": ["--compare", "job", "job", "--store", "{store}"],
    "store import": ["{csv}", "--store", "{other}", "--dry-run"],
    "store export": ["{out}", "--to", "measurements", "--store", "{store}"],
    "report": ["{out}", "--store", "{store}"],
    "daemon metrics": ["--endpoint", "ipc:///nowhere/d.sock", "--store", "{store}"],
    "hardware": [],
    "doctor": ["--endpoint", "ipc:///nowhere/d.sock", "--store", "{store}"],
    "daemon keys": ["{keys}"],
    "advise": ["1.3B"],
    "store models": ["--store", "{store}"],
    "store backup": ["{copy}", "--store", "{store}", "--force"],
    "store check": ["--store", "{store}"],
    "store repair": ["{store}"],
}

CSV = """\
collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,bandwidth_gbps,latency_us
allgather,1048576,ring,simple,4,2,16,1,0,0,0,120.5
allgather,1048576,default,default,0,2,16,1,0,0,0,150.5
"""


def commands(group, prefix="") -> dict[str, object]:
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{prefix}{name} ")
        if not hasattr(command, "commands") or command.invoke_without_command:
            found[prefix + name] = command
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    for name, content in (("empty", b""), ("junk", bytes(range(256)) * 64), ("tuner.csv", CSV.encode())):
        (folder / name).write_bytes(content)
    with (folder / "huge").open("wb") as file:
        file.truncate(6 << 30)  # sparse: takes no disk, but whoever reads it whole runs out of memory
    (folder / "folder").mkdir()
    with Store.open(folder / "s.db") as store:
        store.record_job("job", "fabric", {}, 2)
        store.record_steps("job", [StepRecord(step, step // 10, 1000.0 + step) for step in range(40)])
        key = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.other, 80)
        store.record_decisions([Decision("job", "fabric", key, BASELINE, 1, "keep", "nothing better")])
        store.record_measurements("fabric", "job", _sweep())
        store.flush()
    return {
        **{name: str(folder / name) for name in ("none", "empty", "junk", "huge", "folder", "out", "copy", "keys")},
        "csv": str(folder / "tuner.csv"),
        "store": str(folder / "s.db"),
        "other": str(folder / "other.db"),
        "pid": "1",
    }


def _sweep():
    import numpy as np

    from zerotune.store.records import Source
    from zerotune.store.sqlite.database import MEASUREMENT

    block = np.zeros(12, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"], block["collective"] = 2, 1, 4096, 2
    block["algorithm"], block["protocol"], block["duration_us"], block["source"] = 1, 2, 50.0, Source.sweep
    return block


def run(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["zerotune", *words])
    for name in ("ZEROTUNE_STORE", "ZEROTUNE_ENDPOINT", "ZEROTUNE_CURVE_KEYS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def filled(words: list[str], places: dict[str, str]) -> list[str]:
    return [word.format(**places) if "{" in word else word for word in words]


def test_the_tables_name_every_command():
    known = commands(get_command(app)).keys()
    assert known == MISTAKES.keys()
    assert known == AS_JSON.keys() | NO_JSON | JSON_ELSEWHERE
    assert not AS_JSON.keys() & (NO_JSON | JSON_ELSEWHERE)


@pytest.mark.parametrize("name", MISTAKES)
def test_help_has_an_example(name: str, monkeypatch, capsys):
    code, text, _ = run(monkeypatch, capsys, *name.split(), "--help")
    assert code == 0
    assert "Example: zerotune " + name in " ".join(text.split())
    assert ("--json" in text) == (name not in NO_JSON)


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, all_ in MISTAKES.items() for words in all_])
def test_mistakes_are_one_line_and_exit_code_2(name, words, places, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, text, error = run(monkeypatch, capsys, *name.split(), *filled(words, places))
    assert error.startswith("zerotune: "), (text, error)
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    assert "[Errno" not in error
    assert len(error) < 2000, "what was given is not repeated whole"
    assert code == 2, error
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


@pytest.mark.parametrize("name", AS_JSON)
def test_json_is_json(name, places, monkeypatch, capsys):
    if name == "status":
        from zerotune.store.wire import StatusReply

        reply = StatusReply(1, "0", "ipc://x", "s.db", 1.0, 1, 0)
        monkeypatch.setattr("zerotune.tuner.client.status.fetch_status", lambda *_, **__: reply)
        monkeypatch.setattr("zerotune.tuner.watching.watcher.fetch_status", lambda *_, **__: reply)
        places = {**places, "daemon": "ipc://x"}
    code, text, error = run(monkeypatch, capsys, *name.split(), *filled(AS_JSON[name], places), "--json")
    assert code == 0, error
    assert json.loads(text) is not None


@pytest.mark.parametrize("name", ["", "store", "store book"])
def test_groups_have_an_example_too(name: str, monkeypatch, capsys):
    _, text, _ = run(monkeypatch, capsys, *name.split(), "--help")
    assert "Example: zerotune" in " ".join(text.split())


TAKE_A_STORE = [
    name for name, one in commands(get_command(app)).items() if any("--store" in option.opts for option in one.params)
]


@pytest.mark.parametrize("name", TAKE_A_STORE)
def test_a_store_that_is_a_folder_is_named_with_the_remedy(name, places, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    needed = {
        "replay": ["{csv}"],
        "store import": ["{csv}"],
        "store export": ["{out}"],
        "launch": ["--", "true"],
        "store backup": ["{copy}"],
    }
    words = ["--store", "{folder}", *needed.get(name, [])]
    code, _, error = run(monkeypatch, capsys, *name.split(), *filled(words, places))
    assert (code, error.count("\n")) == (2, 1), error
    assert f"--store {places['folder']}/store.db" in error


def test_words_of_the_training_command_may_be_empty(monkeypatch, capsys):
    code, _, error = run(monkeypatch, capsys, "launch", "--plan", "none.json", "--", "true", "")
    assert (code, error.count("\n")) == (2, 1)
    assert "none.json" in error


def test_version_and_unknown_commands(monkeypatch, capsys):
    code, text, _ = run(monkeypatch, capsys, "--version")
    assert code == 0
    assert text.startswith("zerotune ")
    code, _, error = run(monkeypatch, capsys, "traing")
    assert (code, error.count("\n")) == (2, 1)


def test_a_damaged_store_is_named_wherever_it_stands_in_the_command(tmp_path):
    import sqlite3

    from zerotune.store.paths import default_store_path
    from zerotune.tuner.cli.paths import store_in_use

    store, trace = tmp_path / "s.db", tmp_path / "t.zttrace"
    trace.touch()
    with sqlite3.connect(store) as connection:
        connection.execute("CREATE TABLE one (a)")
    for words in (["store", "check", str(store)], ["advise", f"--measured={store}"], ["x", str(store), str(trace)]):
        assert store_in_use(words) == store
    assert store_in_use(["replay", str(trace), "x" * 5000]) == default_store_path()
    assert str(store_in_use(["replay", str(store), "--store", "a.db"])) == "a.db"


def test_damaged_stores_and_interrupts(monkeypatch, capsys):
    import sqlite3

    from zerotune.store.paths import default_store_path

    for failure in (sqlite3.DatabaseError("database disk image is malformed"), sqlite3.OperationalError("is\nlocked")):
        failing = Mock(side_effect=failure)
        monkeypatch.setattr("zerotune.tuner.offline.explaining.explain", failing)
        for words, named in (((), default_store_path()), (("--store", "a.db"), "a.db"), (("--store=b.db",), "b.db")):
            code, _, error = run(monkeypatch, capsys, "explain", *words)
            assert (code, error.count("\n")) == (2, 1)
            assert f"store {named} " in error
    monkeypatch.setattr(
        "zerotune.tuner.offline.explaining.explain", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    code, _, error = run(monkeypatch, capsys, "explain")
    assert code == 130
    assert "Traceback" not in error
