"""Every value of every JSON format replaced by what it should not be: a TraceError, or records that are in bounds."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trace_samples as samples

from zerotune.store.errors import TraceError
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.records import MAX_BYTES

HOSTILE = (
    10**400, -(10**400), 2**64, 2**63, -1, 0, 1.5, 1e308, float("nan"), float("inf"), True, None, "", "x" * 300,
    "9" * 30, "\ud800", [], [[]], {}, [10**30], [-5], [1.5], {"a": {}},
)  # fmt: skip


def lines_of(name: str, n_lines: int) -> list[Any]:
    path = samples.REAL[name]
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).split(b"\n")[:n_lines] if line.strip()]


def reduced(name: str, key: str, wanted: str) -> dict[str, Any]:
    """A real document with a few of its elements."""
    document = json.loads(gzip.decompress(samples.REAL[name].read_bytes()))
    chosen = [element for element in document[key] if wanted in json.dumps(element)]
    return {**document, key: chosen[:3]}


DOCUMENTS: dict[str, Any] = {
    "flight_recorder": samples.FLIGHT_RECORDER,
    "nccl_tests_json": samples.NCCL_TESTS_JSON,
    "kineto": reduced("kineto", "traceEvents", "Collective name"),
    "kineto_old": reduced("kineto_old", "traceEvents", "nccl"),
    "execution_trace": reduced("execution_trace", "nodes", "record_param_comms"),
    "execution_trace_old": reduced("execution_trace_old", "nodes", "record_param_comms"),
}
LINES: dict[str, list[Any]] = {
    "inspector": [json.loads(line) for line in samples.INSPECTOR.splitlines()[:2]],
    "profiler_events": lines_of("profiler_events", 40),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A document with another value at `path`; it shares all else with the one it is made of."""
    changed = inside = copy.copy(value)
    for key in path[:-1]:
        inside[key] = copy.copy(inside[key])
        inside = inside[key]
    inside[path[-1]] = new
    return changed


def check(path: Path, format_name: str) -> None:
    try:
        blocks = list(read_trace(path, format_name).blocks())
        list(read_trace(path, format_name).observations())
    except TraceError:
        return
    for block in blocks:
        assert (block["message_bytes"] <= MAX_BYTES).all()
        assert (block["n_channels"] <= 64).all()
        assert (block["duration_us"] < 1e13).all()


def changed_values(document: Any, per_place: int) -> Iterator[Any]:
    for index, path in enumerate(places(document)):
        for step in range(per_place):
            yield replaced(document, path, HOSTILE[(index * per_place + step) % len(HOSTILE)])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_any_value_of_a_document_may_be_wrong(tmp_path: Path, name: str) -> None:
    document = DOCUMENTS[name]
    path = tmp_path / "trace_rank_1.json"
    n_places = sum(1 for _ in places(document))
    for changed in changed_values(document, max(1, min(len(HOSTILE), 300 // n_places))):
        path.write_text(json.dumps(changed))
        check(path, name.removesuffix("_old"))


def test_any_value_of_a_pickle_may_be_wrong(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_1"
    for changed in changed_values(samples.FLIGHT_RECORDER, 8):
        try:
            path.write_bytes(pickle.dumps(changed, protocol=2))
        except UnicodeEncodeError:
            continue
        check(path, "flight_recorder_pickle")


@pytest.mark.parametrize("name", LINES)
def test_any_value_of_a_line_may_be_wrong(tmp_path: Path, name: str) -> None:
    lines = LINES[name]
    path = tmp_path / "log.jsonl"
    n_places = sum(1 for _ in places(lines))
    for changed in changed_values(lines, max(1, min(len(HOSTILE), 300 // n_places))):
        path.write_text("\n".join(map(json.dumps, changed)) + "\n")
        check(path, name)


@pytest.mark.parametrize(
    "line",
    [
        "n:1:2 [0] NCCL INFO Pattern " + "9" * 5000 + ", crossNic 0, nChannels 8, bw 1/4, type NVL/PXB, sameChannels 1",
        "n:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 8, bw 1.2.3/..., type NVL/PXB, sameChannels 1",
        "n:1:2 [0] NCCL INFO comm 0x" + "f" * 5000 + " rank 0 nRanks 8 nNodes 1 localRanks 8 localRank 0 MNNVL 0",
        "n:1:2 [0] NCCL INFO NCCL version 999.999.999",
        "n:1:2 [0] NCCL INFO   AllGather |     1.2.3/   ... |",
        "   1024   128   float    none      -1    1.2.3    0.05    0.03       0    ....    0.05    0.03       0",
        "   1024   128   float    none      -1    1e999    0.05    0.03       0    1e-999    0.05    0.03       0",
        "9" * 5000 + "   128   float    none      -1    20.5    0.05    0.03       0    20.5    0.05    0.03       0",
        "# nThread 1 agg iters: 999999999",
        "#  size count type redop root time algbw busbw #wrong " + "x " * 500 + "time algbw busbw #wrong",
    ],
)
@pytest.mark.parametrize("name", ["nccl_debug", "nccl_tests"])
def test_hostile_lines_of_logs_and_tables(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / "all_gather.log"
    path.write_text("# nThread 1\nn:1:2 [0] NCCL INFO NCCL version 2.28.9\n" + line + "\n" + line + "\n")
    check(path, name)


def test_hostile_file_names(tmp_path: Path) -> None:
    for name in ("_dump_" + "9" * 40 + ".json", "trace_rank_4294967295.json", "trace_rank_-1.json"):
        path = tmp_path / name
        path.write_text(json.dumps(samples.FLIGHT_RECORDER))
        assert len(list(read_trace(path).observations())) == 2


@pytest.mark.parametrize("size", [-5, 10**30])
@pytest.mark.parametrize(("name", "key"), [("kineto", "In msg nelems"), ("execution_trace", "in_msg_nelems")])
def test_an_impossible_size_is_not_made_good_by_the_other_side(name: str, key: str, size: int, tmp_path: Path) -> None:
    document, path = DOCUMENTS[name], tmp_path / "trace_0.json"
    named = [place for place in places(document) if key in (place[-1], _at(document, place))]
    sizes = [place if place[-1] == key else (*place[:-1], "value") for place in named]  # an attribute's value
    path.write_text(json.dumps(document))
    n_whole = sum(map(len, read_trace(path).blocks()))
    n_lost = 0
    for place in sizes:
        path.write_text(json.dumps(replaced(document, place, size)))
        trace = read_trace(path)
        n_records = sum(map(len, trace.blocks()))
        assert n_records == n_whole - trace.summary.unusable[LeftOut.impossible_size]
        n_lost += n_whole - n_records
    assert 0 < n_lost <= len(sizes), "waits and barriers have no size to lose"


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
