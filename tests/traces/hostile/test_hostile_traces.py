"""Damaged and malicious files: a TraceError or a valid beginning, never anything else."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import trace_samples as samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerotune.store.errors import TraceError
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.formats import by_name
from zerotune.tuner.traces.pytorch.plain_pickle import load_plain
from zerotune.tuner.traces.records import Block, Summary


def contents(name: str) -> bytes:
    if name in samples.WRITTEN:
        return samples.WRITTEN[name][1]
    data = samples.REAL[name].read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


NAMES = sorted({*samples.WRITTEN, *samples.REAL})
FORMAT_OF = {name: name.removesuffix("_old").removesuffix("_torn") for name in NAMES}


def read_as(path: Path, name: str) -> list[Block]:
    return list(by_name(FORMAT_OF[name]).read(path, Summary()))


def rows_of(blocks: list[Block]) -> list[tuple[object, ...]]:
    return [
        (row["collective"].item(), row["message_bytes"].item(), row["n_ranks"].item())
        for block in blocks
        for row in block
    ]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("name", NAMES)
def test_any_truncation_is_an_error_or_a_valid_beginning(name: str, tmp_path: Path, data: st.DataObject) -> None:
    whole = contents(name)
    path = tmp_path / "trace_rank_1"
    path.write_bytes(whole)
    expected = set(rows_of(read_as(path, name)))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = rows_of(read_as(path, name))
    except TraceError:
        return
    if name not in ("nccl_tests", "nccl_tests_torn"):  # a cut table row may end in a shorter number
        # Facts at the end of a file (groups, launches) may be missing, and then fewer records are usable.
        unknown_ranks = {(collective, size, 0) for collective, size, _ in expected}
        assert set(found) <= expected | unknown_ranks


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("name", NAMES)
def test_any_damage_is_an_error_or_records(name: str, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(contents(name)[:20_000])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(0, len(whole) - 1)))
        whole[at : at + data.draw(st.integers(0, 8))] = data.draw(
            st.one_of(
                st.binary(max_size=8),
                st.sampled_from(
                    [
                        b"9" * 40,
                        b"-1",
                        b"1e999",
                        b"null",
                        b'"',
                        b"{" * 50,
                        b"[" * 50,
                        b"NaN",
                        b"-" + b"9" * 25,
                        b"\xff\xff",
                    ]
                ),
            )
        )
    path = tmp_path / "trace_rank_1"
    path.write_bytes(bytes(whole))
    try:
        blocks = read_as(path, name)
    except TraceError:
        return
    for block in blocks:
        assert (block["collective"] <= 10).all()
        assert ((block["algorithm"] <= 6) | (block["algorithm"] == 255)).all()
        assert not np.isnan(block["duration_us"]).any()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=400))
def test_random_bytes_are_never_a_crash(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "noise"
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        list(read_trace(path).blocks())
    for name in NAMES:
        with contextlib.suppress(TraceError):
            read_as(path, name)


@pytest.mark.parametrize("name", ["flight_recorder", "nccl_tests_json", "kineto"])
def test_documents_one_after_the_other_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace_rank_1"
    path.write_bytes(contents(name) + b"\n \n")
    assert read_as(path, name)
    path.write_bytes(contents(name) + b"\n" + contents(name))
    with pytest.raises(TraceError, match="goes on"):
        read_as(path, name)


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/zerotune-was-here",)


@pytest.mark.parametrize(
    "evil",
    [
        pickle.dumps({"entries": [Malicious()]}),
        pickle.dumps(Malicious(), protocol=0),
        pickle.dumps({"entries": {1, 2}}),
        pickle.dumps(Path("/etc/passwd")),
        pickle.dumps(bytearray(b"x"), protocol=5),
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02(K\x01K\x02o.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02}(((K\x01\x85\x85K\x02u.",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02h\x05.",
        b"\x80\x02.",
        b"",
    ],
)
def test_pickles_can_do_nothing(evil: bytes, tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(evil)
    with pytest.raises(TraceError):
        list(by_name("flight_recorder_pickle").read(path, Summary()))
    assert not Path("/tmp/zerotune-was-here").exists()


def test_a_pickle_of_shared_lists_takes_no_time(tmp_path: Path) -> None:
    bomb: list[object] = []
    for _ in range(80):  # 2**80 leaves if anybody walks it
        bomb = [bomb, bomb]
    dump = {
        "version": bomb,
        "pg_config": {"0": {"ranks": bomb}, "1": bomb},
        "entries": [{**samples.FLIGHT_RECORDER["entries"][0], "process_group": bomb, "input_sizes": bomb}, bomb],
    }
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump))
    list(read_trace(path).blocks())
    with pytest.raises(TraceError, match="key"):
        load_plain(pickle.dumps({((1, 2), 3): 4}))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=20,
    ),
    st.integers(0, pickle.HIGHEST_PROTOCOL),
)
def test_plain_data_survives(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    try:
        assert load_plain(data) == value
    except TraceError:
        assert protocol < 3, "old protocols spell bytes as calls"


def test_memory_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    with path.open("w") as file:
        for _ in range(4000):
            file.write(samples.INSPECTOR)
    n_bytes = path.stat().st_size
    tracemalloc.start()
    n_records = sum(len(block) for block in read_trace(path).blocks())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_records == 48_000
    assert n_bytes > 18 << 20
    assert peak < 14 << 20


def test_streamed_json_holds_no_more_than_a_piece(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::view", "ts": 1, "dur": 1, "args": {"External id": 1}}
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [')
        file.write(", ".join([json.dumps(event)] * 60_000))
        file.write("]}")
    tracemalloc.start()
    assert list(read_trace(path).blocks()) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 5 << 20
    assert peak < 5 << 20
