"""What benchmarks refuse: one message that names the value and the remedy, exit code 2, before any work."""

from __future__ import annotations

import argparse
import gzip
import importlib
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.__main__ import main, module_of
from benchmarks.lib.data import generated_csvs
from benchmarks.lib.data.data_sets import check_sources, of_folder, of_store
from zerotune.store.sqlite.database import Store
from zerotune.tuner.offline.export import export_measurements
from zerotune.tuner.offline.importing.command import import_measurements

HUGE = "9" * 5000
MISTAKES = {
    "budget_frontier": [
        *(["--percent", text] for text in ("0", "-1", "nan", "101", "much")),
        *(["--picture", "{none}/x.svg"], ["--picture", "/proc/x.svg"]),
    ],
    "chaos": [["--ranks", "0"], ["--events", "nope"], ["--nodes", "2", "--daemons", "2"], ["--events", "kill_rank"]],
    "demo": [["--steps", "0"], ["--picture", "{none}/x.svg"], ["--picture", "{new}.txt"]],
    "generated_csvs": [
        *(["{junk}"], ["/proc/x"], ["{new}", "--machines", "0"], ["{new}", "--machines", HUGE]),
        *(["{new}", "--seed", "-1"], ["{new}", "--nodes", "0"], ["{new}", "--nodes", "1000000"]),
        *(["{new}", "--noise", text] for text in ("nan", "inf", "-0.1", "much")),
        ["{new}", "--keys", "-3"],
    ],
    "learning_pictures": [
        *([option, path] for option in ("--curves", "--prediction") for path in ("{none}", "{junk}", "{list}")),
        ["{junk}"],
    ],
    "never_in_the_way": [["--shapes", "nope"], ["--faults", "nope"]],
    "policy_regret": [
        *(["--store", "{empty}"], ["--curves", "{empty}"], ["--curves", "/proc/x"], ["--draws", HUGE]),
        *(["--family", *words] for words in (["--only", "nope"], ["--calls", "5"], ["--data", "{empty}"])),
    ],
    "prediction_warm_start": [*(["--calls", text] for text in ("-1", "0", "1.5", "ten", "100001"))],
    "replay_speed": [["--seed", "-1"], ["--no-check", "--check-only"]],
    "replay_what_if": [["--fabric", "nope"]],
    "small_gathers": [["--generated", "-1"], ["--data", "{junk}"], ["--data", "{empty}"]],
    "soak": [["--ranks", "1"], ["--ranks", "17"], ["--collectives", "0"], ["--fabric", "nope"], ["--fabric", "{junk}"]],
    "soak_daemon": [["--ranks", "1"], ["--collectives", "0"], ["--hours", "-1"]],
    "stage_fingerprint": [
        *(["--traces", "{none}"], ["--learned", "{junk}"], ["--n-each", "0"], ["--seed", "x"]),
        ["--unnamed-only", "--shipped-only"],
    ],
    "stage_recordings": [["--only", "ddp,nope"], ["--out", "{empty}"], ["--out", "{junk}"]],
    "sweep_speed": [["--data", "{none}"], ["--data", "{empty}"], ["--data", "{junk}"]],
    "training_reward": [["--generated", "-1"], ["--only", "nope"], ["--host-ahead", "5"], ["--exposure", "half"]],
    "zero_vs_peers": [
        ["--keep", "{junk}"],
        ["--keep", "{list}"],
        ["--keep", "{none}/x"],
        ["--only", "nope"],
        ["--transformers", "--only", "tiny-fp32-2"],
    ],
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "junk").write_bytes(bytes(range(256)))
    (tmp_path / "list").write_text("[1]\n")
    (tmp_path / "empty").mkdir()
    return {name: str(tmp_path / name) for name in ("junk", "list", "empty", "none", "new")}


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, all_ in MISTAKES.items() for words in all_])
def test_mistakes_are_refused_in_words(
    name: str, words: list[str], places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    words = [word.format(**places) for word in words]
    before = {path: path.read_bytes() for path in map(Path, places.values()) if path.is_file()}
    out = [places["new"]] if name == "learning_pictures" and words[0].startswith("--") else []
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *out, *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module_of(name)).main()
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert (ended.value.code, said.out) == (2, ""), last
    assert last.startswith(f"{name}.py: error: "), last
    assert words[-1][:40].split(",")[-1] in last or words[-1].startswith("--")
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_csvs, "SETTINGS", generated_csvs.SETTINGS[:3])
    monkeypatch.setattr(generated_csvs, "CHANNELS", (4,))
    monkeypatch.setattr(generated_csvs, "SIZES", generated_csvs.SIZES[::8])


def test_a_name_that_no_benchmark_has_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nope"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "'nope'" in capsys.readouterr().err


@pytest.mark.usefixtures("few")
def test_a_single_rank_count_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generated_csvs.write(tmp_path / "own.csv", 1, 0.02, (2,))
    monkeypatch.setattr(sys, "argv", ["prediction_warm_start.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module_of("prediction_warm_start")).main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"--data {tmp_path}" in said
    assert "own with 16 ranks" in said


@pytest.mark.usefixtures("few")
def test_damaged_files_of_a_folder_are_named_and_the_others_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generated_csvs.write(tmp_path / "good.csv", 1, 0.02, (2,))
    (tmp_path / "junk.csv").write_bytes(bytes(range(256)))
    (tmp_path / "junk.log.gz").write_bytes(bytes(range(256)))
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(b"#" * 100_000)[:60])
    header = (tmp_path / "good.csv").read_text().splitlines()[0]
    (tmp_path / "default.csv").write_text(f"{header}\nallgather,4096,default,default,0,1,8,-1,-1,,,3\n")
    assert [one.name for one in of_folder(tmp_path)] == ["good"]
    said = capsys.readouterr().err
    assert all(f"{tmp_path / name}: left out" in said for name in ("junk.csv", "junk.log.gz", "cut.log.gz"))
    assert f"{tmp_path / 'default.csv'}: left out" in said


@pytest.mark.usefixtures("few")
def test_data_sets_tell_files_and_fabrics_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        generated_csvs.write(tmp_path / folder / "own.csv", seed, 0.02, (2,))
    assert sorted(one.name for one in of_folder(tmp_path)) == ["a/own", "b/own"]
    said = {"fabric_id": "both", "setting": None, "is_default": False, "n_nodes": None, "dry_run": False}
    for folder in ("a", "b"):
        import_measurements(tmp_path / folder, tmp_path / "s.db", **said)
    assert [one.name for one in of_store(tmp_path / "s.db")] == ["both"]
    assert "both: 2 " in capsys.readouterr().err


@pytest.mark.usefixtures("few")
def test_a_file_of_two_fabrics_is_two_data_sets(tmp_path: Path) -> None:
    for seed in (1, 2):
        generated_csvs.write(tmp_path / f"{seed}.csv", seed, 0.02, (2,))
        said = {"fabric_id": f"f{seed}", "setting": None, "is_default": False, "n_nodes": None, "dry_run": False}
        import_measurements(tmp_path / f"{seed}.csv", tmp_path / "s.db", **said)
    (tmp_path / "out").mkdir()
    export_measurements(tmp_path / "s.db", tmp_path / "out" / "all.csv")
    assert [one.name for one in of_folder(tmp_path / "out")] == ["all:f1", "all:f2"]
    assert [len(one.problems) for one in of_folder(tmp_path / "out")] == [6, 6]


def test_a_newer_store_gets_one_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.db"
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        columns = "migration_set, name, applied_at"
        connection.execute(f"INSERT INTO _sqlite_migrations ({columns}) VALUES ('zerotune', 'm999_later', '')")
    for store, remedy in ((path, "version"), (tmp_path / "none.db", "`zerotune import")):
        with pytest.raises(SystemExit):
            check_sources(argparse.ArgumentParser(), store, None)
        said = capsys.readouterr().err
        assert remedy in said
        assert said.splitlines()[-1].count(";") == 1
