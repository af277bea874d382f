"""Our own trace: what the agent writes is what the reader gives back, whatever happens to the file."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.agent.observing.trace_log import MAX_BLOCK_RECORDS, TraceLog
from zerotune.store.errors import TraceError
from zerotune.store.records import StepRecord
from zerotune.store.trace_format import MAX_MEMBER_BYTES, TRACE_SUFFIX, RecordBlock, TraceEnd, TraceHeader, pack_member
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.traces.own.reader import RECORD_DTYPE, iter_members, read_own, trace_files

HEADER = TraceHeader("zerotune-trace", 1, "job", 0, 2, "f", {"emulated": "x"}, "emulated", 1.0, "zerotune 0")


def new_log(directory: Path, **changes: object) -> TraceLog:
    arguments = {
        "job_id": "job/1",
        "rank": 3,
        "n_ranks": 4,
        "fabric_id": "f00",
        "fabric": {"emulated": "one_nvlink_node"},
        "version": "0.1.0",
        "clock_s": lambda: 0.0,
    } | changes
    return TraceLog(directory, **arguments)


def records_from(seed: int, n_records: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, n_records * RECORD_DTYPE.itemsize, dtype=np.uint8)
    return raw.view(RECORD_DTYPE)


def typical_records(n_records: int) -> np.ndarray:
    """Four steps' worth of a training job's pattern, repeated, with noise in times."""
    noise = np.random.default_rng(7)
    records = np.zeros(n_records, OBSERVATION_FIELDS)
    index = np.arange(n_records)
    message_bytes = noise.integers(1, 5000, 48) * 4096
    records["comm_id"] = 0x1234_5678_9ABC_DEF0
    records["message_bytes"] = message_bytes[index % 48]
    records["duration_us"] = message_bytes[index % 48] / 1e3 * noise.lognormal(0, 0.05, n_records)
    records["start_ns"] = 1_790_000_000_000_000_000 + np.cumsum(noise.integers(10_000, 900_000, n_records))
    records["sequence"] = index // 2
    records["step"] = index // 48
    records["collective"] = 2 + index % 2
    records["n_channels"] = 8
    records["memory_pressure"] = 0.5 + 0.1 * noise.random(n_records)
    return records


@settings(max_examples=40)
@given(blocks=st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 300)), max_size=5), data=st.data())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[int, int]], data: st.DataObject):
    steps = data.draw(
        st.lists(
            st.builds(
                StepRecord,
                step=st.integers(0, 2**32 - 1),
                epoch=st.integers(0, 2**32 - 1),
                duration_us=st.floats(0, 1e12),
                exposed_us=st.none() | st.floats(0, 1e12),
                memory_pressure=st.none() | st.floats(0, 1, width=32),
            ),
            max_size=5,
        )
    )
    log = new_log(tmp_path_factory.mktemp("trace"))
    arrays = [records_from(seed, n_records) for seed, n_records in blocks]
    for array in arrays:
        log.record(array, n_dropped=9)
        if data.draw(st.booleans()):
            log.flush()
    log.steps(steps)
    log.close()
    assert log.path is not None
    trace = read_own(log.path)
    assert trace.header.job_id == "job/1"
    assert (trace.header.rank, trace.header.n_ranks, trace.header.clock) == (3, 4, "emulated")
    assert trace.ended
    assert trace.n_dropped == (9 if arrays else 0)
    expected = np.concatenate([np.empty(0, RECORD_DTYPE), *arrays])
    assert trace.records.tobytes() == expected.tobytes()
    assert trace.steps["step"].tolist() == [step.step for step in steps]
    exposed_us = [np.nan if step.exposed_us is None else step.exposed_us for step in steps]
    assert np.array_equal(trace.steps["exposed_us"], exposed_us, equal_nan=True)


def test_no_other_user_reads_what_tells_of_the_model(tmp_path: Path):
    before = os.umask(0)
    try:
        log = new_log(tmp_path)
    finally:
        os.umask(before)
    log.close()
    assert log.path is not None
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_cut_at_every_byte_gives_the_whole_blocks_before(tmp_path: Path):
    log = new_log(tmp_path)
    boundaries = []
    for seed in range(3):
        log.record(records_from(seed, 2))
        log.flush()
        assert log.path is not None
        boundaries.append(log.path.stat().st_size)
    log.close()
    whole = log.path.read_bytes()
    n_header_bytes = len(pack_member(next(iter_members(log.path))))
    cut = tmp_path / "cut"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        if length < n_header_bytes:
            with pytest.raises(TraceError, match=rf"byte {length}\b" if length else "empty"):
                read_own(cut)
            continue
        trace = read_own(cut)
        assert len(trace.records) == 2 * sum(boundary <= length for boundary in boundaries)
        assert not trace.ended


def test_every_flipped_byte_is_caught_or_harmless(tmp_path: Path):
    """The members' checksums: records are as written, or the reader says that the file is damaged."""
    log = new_log(tmp_path)
    written = records_from(1, 6)
    log.record(written)
    log.close()
    assert log.path is not None
    whole = log.path.read_bytes()
    broken = tmp_path / "broken"
    for position in range(len(whole)):
        broken.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        try:
            records = read_own(broken).records
        except TraceError:
            continue
        assert len(records) == 0 or records.tobytes() == written.tobytes()


@pytest.mark.parametrize(
    "change", [{"job_id": "j\0b"}, {"fabric_id": "f\0"}, {"fabric": {"emulated": "x\0.toml"}}], ids=str
)
def test_names_that_no_file_or_program_can_be_given_are_refused(tmp_path: Path, change: dict[str, object]):
    path = tmp_path / "x.zttrace"
    path.write_bytes(pack_member(msgspec.structs.replace(HEADER, **change)))
    with pytest.raises(TraceError):
        read_own(path)


@settings(max_examples=60)
@given(body=st.binary(max_size=200), as_gzip=st.booleans(), after_header=st.booleans())
def test_hostile_bytes_raise_trace_error_only(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, as_gzip: bool, after_header: bool
):
    path = tmp_path_factory.mktemp("hostile") / "x"
    tail = gzip.compress(body) if as_gzip else body
    path.write_bytes((pack_member(HEADER) if after_header else b"") + tail)
    try:
        trace = read_own(path)
    except TraceError:
        return
    assert after_header
    assert len(trace.records) == 0


def test_a_bomb_is_refused(tmp_path: Path):
    path = tmp_path / "bomb"
    path.write_bytes(pack_member(HEADER) + gzip.compress(bytes(MAX_MEMBER_BYTES + 1), compresslevel=0))
    with pytest.raises(TraceError, match=f"more than {MAX_MEMBER_BYTES // 2**20} MiB"):
        read_own(path)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (RecordBlock(5, {"message_bytes": b"short"}), "another length"),
        (RecordBlock(-1, {"message_bytes": b""}), "another length"),
        (RecordBlock(2**40, {}), "another length"),
    ],
)
def test_lying_blocks_are_refused(tmp_path: Path, block: RecordBlock, told: str):
    path = tmp_path / "lie"
    path.write_bytes(pack_member(HEADER) + pack_member(block))
    with pytest.raises(TraceError, match=told):
        read_own(path)


def test_other_versions_and_formats_are_named(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(pack_member(msgspec.structs.replace(HEADER, version=2)))
    with pytest.raises(TraceError, match=r"version 2.* version 1\b"):
        read_own(path)
    path.write_bytes(pack_member(msgspec.structs.replace(HEADER, format="other")))
    with pytest.raises(TraceError, match="zerotune"):
        read_own(path)
    path.write_bytes(pack_member(HEADER) * 2)
    with pytest.raises(TraceError, match="second header"):
        read_own(path)


def test_a_trace_of_before_chunk_sizes_is_read(tmp_path: Path):
    written = typical_records(10)
    columns = {name: _planes(written[name]) for name in RECORD_DTYPE.names if name not in ("chunk_bytes", "reserved")}
    members = (HEADER, RecordBlock(10, columns), TraceEnd(10, 0))
    path = tmp_path / f"old{TRACE_SUFFIX}"
    path.write_bytes(b"".join(map(pack_member, members)))
    found = read_own(path).records
    assert not found["chunk_bytes"].any()
    np.testing.assert_array_equal(found[[*columns]], written[[*columns]])


def _planes(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values).view("u1").reshape(len(values), -1).T.tobytes()


def test_flushes_by_time_and_by_number(tmp_path: Path):
    now = [0.0]
    log = new_log(tmp_path, clock_s=lambda: now[0])
    log.record(typical_records(10))
    assert log.n_records == 0
    now[0] = 1.5
    log.steps([])
    assert log.n_records == 10
    log.record(typical_records(MAX_BLOCK_RECORDS))
    assert log.n_records == 10 + MAX_BLOCK_RECORDS


def test_a_restarted_rank_starts_a_new_file(tmp_path: Path):
    first, second = new_log(tmp_path), new_log(tmp_path)
    first.close()
    second.close()
    assert first.path != second.path
    assert len(trace_files(tmp_path)) == 2


def test_unwritable_directory_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    log = new_log(tmp_path / "file")
    log.record(typical_records(5))
    log.close()
    assert log.path is None
    assert len(caplog.records) == 1


def test_full_disk_leaves_a_readable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    log = new_log(tmp_path)
    log.record(typical_records(50))
    log.flush()
    write = os.write

    def half_then_full(file: int, data: bytes) -> int:
        if len(data) > 100:
            return write(file, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half_then_full)
    log.record(typical_records(70))
    log.flush()
    log.record(typical_records(1))
    log.flush()
    monkeypatch.undo()
    log.close()
    assert log.path is not None
    trace = read_own(log.path)
    assert len(trace.records) == 50
    assert (log.n_records, log.n_lost) == (50, 71)
    assert sum("ends early" in record.message for record in caplog.records) == 1


def test_kill_9_keeps_what_was_flushed(tmp_path: Path):
    script = f"""
import numpy as np, sys
from pathlib import Path
from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.wire import OBSERVATION_FIELDS
log = TraceLog(Path({str(tmp_path)!r}), job_id="j", rank=0, n_ranks=1, fabric_id="", fabric={{}}, version="0")
log.record(np.zeros(1000, OBSERVATION_FIELDS)); log.flush()
print("ready", flush=True)
while True:
    log.record(np.zeros(1000, OBSERVATION_FIELDS)); log.flush()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    trace = read_own(trace_files(tmp_path)[0])
    assert len(trace.records) >= 1000
    assert len(trace.records) % 1000 == 0
    assert not trace.ended
