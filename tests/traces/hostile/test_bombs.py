"""Packed files that unpack to far more than a trace does: refused at once, and what the store has stays."""

from __future__ import annotations

import gzip
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
import trace_samples as samples
from import_runs import command, stored, table

from zerotune.store.errors import TraceError
from zerotune.store.trace_format import RecordBlock, TraceHeader, pack_member
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.traces import files, read_trace
from zerotune.tuner.traces.files import FREE_BYTES, MAX_RATIO
from zerotune.tuner.traces.own.reader import read_own

BOMB_BYTES = 64 << 20
FORMATS = {name.removesuffix("_old").removesuffix("_torn") for name in {**samples.WRITTEN, **samples.REAL}}
HEADER = TraceHeader("zerotune-trace", 1, "job", 0, 2, "f", {}, "emulated", 1.0, "zerotune 0")


def packed_again_and_again(piece: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = piece * ((1 << 20) // len(piece))
    return b"".join([*(packer.compress(block) for _ in range(BOMB_BYTES >> 20)), packer.flush()])


@pytest.fixture(scope="module", params=[b"\0", b"\n", b"{},", b"  1048576  262144  float  sum  -1  20.5\n"])
def bomb(request: pytest.FixtureRequest) -> bytes:
    return packed_again_and_again(request.param)


def test_import_refuses_a_bomb_of_any_format(
    tmp_path: Path, bomb: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    store = tmp_path / "store.sqlite"
    begun = ("--store", store, "--fabric-id", "f")
    assert command(monkeypatch, capsys, table(tmp_path / "good.csv", 3), *begun)[0] == 0
    kept = stored(store)
    path = tmp_path / "trace_rank_1"
    path.write_bytes(bomb)
    for name in sorted(FORMATS):
        started_s = time.monotonic()
        code, _, told = command(monkeypatch, capsys, path, *begun, "--format", name)
        assert time.monotonic() - started_s < 3
        assert (code, told.count("\n")) == (2, 1), told
    assert stored(store) == kept


def test_a_bomb_behind_a_good_beginning_costs_little_memory(tmp_path: Path, bomb: bytes):
    path = tmp_path / "log.jsonl"
    path.write_bytes(gzip.compress(samples.INSPECTOR.encode()) + bomb)
    tracemalloc.start()
    with pytest.raises(TraceError, match=str(MAX_RATIO)):
        list(read_trace(path).blocks())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * FREE_BYTES


def test_our_own_trace_may_not_be_one(tmp_path: Path):
    n_records = 200_000
    block = RecordBlock(n_records, {"message_bytes": bytes(8 * n_records)})
    path = tmp_path / "job.zttrace"
    path.write_bytes(pack_member(HEADER) + gzip.compress(gzip.decompress(pack_member(block))) * 100)
    with pytest.raises(TraceError, match=str(MAX_RATIO)):
        read_own(path)


@pytest.mark.parametrize("n_records", [1 << 20, 1 << 22])
def test_a_narrow_column_is_not_widened_beyond_bounds(tmp_path: Path, n_records: int):
    path = tmp_path / "job.zttrace"
    noise = b"".join(index.to_bytes(4, "little") for index in range(n_records // 4 - 16))
    path.write_bytes(pack_member(HEADER) + pack_member(RecordBlock(n_records, {"collective": noise + bytes(64)})))
    with pytest.raises(TraceError):
        read_own(path)


def test_a_block_without_records(tmp_path: Path):
    path = tmp_path / "job.zttrace"
    empty = RecordBlock(0, {name: b"" for name, _ in OBSERVATION_FIELDS})
    path.write_bytes(pack_member(HEADER) + pack_member(empty))
    assert len(read_own(path).records) == 0


def test_the_largest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 1 << 20)
    path = tmp_path / "log.jsonl"
    path.write_bytes(gzip.compress(samples.INSPECTOR.encode() * 1000))
    with pytest.raises(TraceError, match="unpacks to more than"):
        list(read_trace(path).blocks())


def test_many_small_members_take_time_in_proportion(tmp_path: Path):
    """What follows a member is copied as it ends; 100,000 empty ones once took a minute."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(gzip.compress(samples.INSPECTOR.encode()) + gzip.compress(b"") * 100_000)
    started_s = time.monotonic()
    assert sum(map(len, read_trace(path).blocks())) > 0
    assert time.monotonic() - started_s < 5


@pytest.mark.timeout(20)
def test_a_long_table_of_unusable_rows_takes_time_in_proportion(tmp_path: Path):
    path = tmp_path / "summary.csv"
    path.write_text("collective,size_bytes,time_us\n" + "nonsense,1024,1\n" * 60_000)
    trace = read_trace(path)
    assert list(trace.blocks()) == []
    assert trace.summary.unusable.total() == 60_000
