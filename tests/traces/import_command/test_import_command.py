"""`zerotune store import` as its user meets it: what it says, its exit codes, and a store that nothing can spoil."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import trace_samples as samples
from import_runs import command, stored, table

from zerotune.store.errors import TraceError
from zerotune.store.sqlite.database import Store
from zerotune.tuner.traces import trace as trace_module


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / "zerotune.db"


def test_a_dry_run_tells_and_writes_nothing(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, path in samples.everything(tmp_path).items():
        code, out, err = command(monkeypatch, capsys, path, "--dry-run", "--json", "--store", store)
        told = json.loads(out)
        assert (code, err) == (0, ""), name
        assert told["n_records"] > 0
        assert not told["recorded"]
    assert not store.exists()


def test_cut_and_damaged_files_end_in_a_sentence_or_in_what_was_read(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(7)
    for name, path in samples.everything(tmp_path).items():
        whole = path.read_bytes()
        whole = gzip.decompress(whole) if whole[:2] == b"\x1f\x8b" else whole
        for _ in range(2):
            cut = bytearray(whole[: draw.randrange(len(whole))])
            if draw.random() < 0.5 and cut:
                at = draw.randrange(len(cut))
                cut[at : at + 4] = draw.choice([b"\xff\xff\xff\xff", b"NaN,", b"-999", b"[[[[", b'""""', b"\0\0\0\0"])
            damaged = tmp_path / path.name.removesuffix(".gz")
            damaged.write_bytes(bytes(cut))
            code, out, err = command(monkeypatch, capsys, damaged, "--dry-run", "--store", store)
            assert code in (0, 2), (name, err)
            assert bool(out) == (code == 0)
            assert err.count("\n") == (code == 2)
            assert "Traceback" not in err


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('this code was run')",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff" * 5000,
        pickle.dumps({"entries": [Malicious()]}),
        b"\x80\x02}X\x07\x00\x00\x00entries",
        b'{"schemaVersion": 1, "traceEvents": [' + b"[" * 100_000,
        b'{"version": "2.9", "pg_config": {}, "entries": [' + b"9" * 5000 + b"]}",
        b"PK\x03\x04" + bytes(100),
        gzip.compress(b'{"version": "2.9", "pg_config": {}, "entries": [' + b"{}," * 99, mtime=0)[:40],
    ],
)
def test_hostile_files_are_refused_in_one_line(
    content: bytes,
    tmp_path: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    code, out, err = command(monkeypatch, capsys, path, "--store", store)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err
    assert not store.exists()


def test_the_same_file_is_recorded_once(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "t.csv", 10)
    assert json.loads(command(monkeypatch, capsys, path, "--store", store, "--json")[1])["n_measurements"] == 10
    path = path.rename(tmp_path / "moved.csv")
    code, out, _ = command(monkeypatch, capsys, path, "--store", store, "--fabric-id", tmp_path.name, "--json")
    assert (code, json.loads(out)["n_measurements"]) == (0, 0)
    assert len(stored(store)) == 10
    table(path, 12)
    command(monkeypatch, capsys, path, "--store", store)
    assert len(stored(store)) == 22, "another file is another import"


def test_a_file_that_breaks_in_its_middle_leaves_nothing_behind(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, capsys, table(tmp_path / "good.csv", 5), "--store", store)
    before = stored(store)
    packed = bytearray(gzip.compress(table(tmp_path / "t.csv", 30_000).read_bytes()))
    packed[-2000] ^= 0xFF
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(packed)
    code, _, err = command(monkeypatch, capsys, broken, "--store", store)
    assert (code, err.count("\n")) == (2, 1)
    assert "damaged" in err
    assert stored(store) == before


def test_an_import_that_was_killed_goes_on_where_it_ended(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zerotune.tuner.traces.nccl.tuner_csv._ROWS_AT_ONCE", 1000)
    path = table(tmp_path / "t.csv", 3_500)
    n_calls = 0
    record = Store.record_measurements

    def killed(self: Store, fabric_id: str, job_id: str, block: np.ndarray) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise KeyboardInterrupt
        record(self, fabric_id, job_id, block)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "record_measurements", killed)
        assert command(monkeypatch, capsys, path, "--store", store)[0] == 130
    n_before = len(stored(store))
    assert 0 < n_before < 3_500
    code, out, _ = command(monkeypatch, capsys, path, "--store", store, "--json")
    assert (code, json.loads(out)["n_measurements"]) == (0, 3_500 - n_before)
    assert stored(store) == [(1024 * (1 + index), 20.5 + index) for index in range(3_500)]


def test_one_damaged_rank_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = json.dumps(samples.FLIGHT_RECORDER)
    for rank, text in enumerate((good, good.replace('"record_id": 2', '"record_id" 2'), good, good[:-300])):
        (tmp_path / f"_dump_{rank}.json").write_text(text)
    (tmp_path / "README.md").write_text("these are dumps")
    (tmp_path / "_dump_9.json").write_text("")
    code, out, _ = command(monkeypatch, capsys, tmp_path, "--dry-run", "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["n_files"], told["left_out"]["damaged_file"]) == (3, 1)
    assert told["n_records"] >= 5
    for name in ("_dump_1.json", "_dump_3.json", "README.md"):
        assert any(name in note for note in told["notes"]), name
    (tmp_path / "_dump_0.json").write_text("[")
    with pytest.raises(TraceError, match=r"_dump_0\.json"):
        trace_module.read_trace(tmp_path / "_dump_0.json")
