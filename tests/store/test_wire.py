"""The decoder turns any bytes at all into a message or a WireError, never into anything else."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zerotune.store import wire
from zerotune.store.errors import WireError
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    NextStage,
    Phase,
    Plan,
    PlanRow,
    Protocol,
    Stage,
    StepRecord,
)

u32 = st.integers(0, 2**32 - 1)
ordinals = st.integers(0, 2**31 - 1)
epochs = st.integers(0, 2**30)
ranks = st.integers(0, wire.MAX_RANK)
one_line = st.characters(exclude_characters="\n\0", exclude_categories=["Cs"])
ids = st.text(one_line, min_size=1, max_size=20)
names = st.text(one_line, max_size=20)
real = st.floats(-1e15, 1e15)
facts = st.dictionaries(names, names | st.integers(-(2**63), 2**63 - 1) | st.booleans() | real, max_size=4)
steps = st.builds(StepRecord, ordinals, ordinals, real, st.none() | real, st.none() | st.floats(0, 1))
candidates = st.just(BASELINE) | st.builds(
    Candidate,
    st.sampled_from(Algorithm),
    st.sampled_from(Protocol),
    st.integers(0, 64),
    st.sampled_from((0, 4096, 2**25)),
)
rows = st.builds(
    PlanRow,
    st.builds(CommunicatorClass, u32, u32),
    st.sampled_from(Collective),
    st.sampled_from(Phase),
    u32,
    u32,
    candidates,
    names,
    names,
)
some_rows = st.lists(rows, max_size=3).map(tuple)
stages = st.builds(NextStage, st.integers(1, 2**31 - 1), ordinals, some_rows)
plans = st.builds(Plan, ordinals, some_rows, st.booleans(), st.lists(stages, max_size=3).map(tuple))
agent_messages = st.one_of(
    st.builds(wire.Hello, ids, ranks, ranks, ranks, names, u32, names, facts, u32, u32, epochs),
    st.builds(wire.Steps, ids, ranks, st.lists(steps, max_size=3).map(tuple)),
    st.builds(wire.Adopted, ids, epochs, ordinals),
    st.builds(wire.Goodbye, ids, ranks, st.text(one_line, max_size=wire.MAX_ID_LENGTH)),
    st.builds(wire.Bell, ids, ordinals),
    st.just(wire.StatusRequest()),
)
statuses = st.builds(
    wire.JobStatus, ids, names, st.sampled_from(Stage), ranks, u32, u32, u32, u32, u32, u32, real, real, real
)
daemon_messages = st.one_of(
    st.builds(wire.Welcome, u32, names),
    st.builds(wire.PlanOffer, ids, plans),
    st.builds(wire.Observe, ids, ordinals),
    st.builds(wire.StatusReply, u32, names, names, names, real, u32, u32, st.lists(statuses, max_size=2).map(tuple)),
    st.builds(wire.ErrorReply, names, names),
)

OBSERVATION = np.dtype(wire.OBSERVATION_FIELDS)
COST = np.dtype(wire.COST_FIELDS)


TOO_LARGE = {
    "message_bytes": 2**63, "n_ranks": wire.MAX_RANK + 2, "n_nodes": 2**31, "duration_us": np.inf,
    "memory_pressure": np.inf, "n_algorithms": 8, "n_protocols": 4, "n_pipe_ops": 2**31,
    "chunk_bytes": 2**25 + 1,
}  # fmt: skip


def decode_or_refuse(frames: list[bytes]) -> None:
    for decode in (wire.decode_agent, wire.decode_daemon):
        with contextlib.suppress(WireError):
            decode(frames)


@given(agent_messages)
def test_agent_messages_round_trip(message):
    assert wire.decode_agent(wire.encode(message)) == (message, None)


@given(daemon_messages)
def test_daemon_messages_round_trip(message):
    assert wire.decode_daemon(wire.encode(message)) == message


@given(st.integers(0, 20), st.sampled_from([(wire.Observations, OBSERVATION), (wire.CostTables, COST)]))
def test_records_round_trip_bit_by_bit(n, kind):
    message_type, dtype = kind
    records = np.frombuffer(np.random.default_rng(n).bytes(n * dtype.itemsize), dtype).copy()
    for field in set(dtype.names) & set(TOO_LARGE):
        records[field] = 1
    message = message_type("job", 3, n)
    decoded, raw = wire.decode_agent(wire.encode(message, records.tobytes()))
    assert decoded == message
    assert raw == records.tobytes()


def test_the_layouts_have_the_promised_width():
    assert OBSERVATION.itemsize == wire.OBSERVATION_BYTES
    assert COST.itemsize == wire.COST_BYTES


@given(agent_messages, st.data())
def test_a_truncated_frame_is_refused(message, data):
    frames = wire.encode(message)
    which = data.draw(st.integers(0, 1))
    frames[which] = frames[which][: data.draw(st.integers(0, len(frames[which]) - 1))]
    with pytest.raises(WireError):
        wire.decode_agent(frames)


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_random_frames_are_refused(frames):
    decode_or_refuse(frames)
    with pytest.raises(WireError):
        wire.decode_agent(frames)


@settings(max_examples=100)
@given(st.binary(max_size=200), st.none() | st.binary(max_size=200))
def test_random_bodies_are_decoded_or_refused(body, records):
    decode_or_refuse([wire.HEADER, body] + ([] if records is None else [records]))


@settings(max_examples=100)
@given(agent_messages | daemon_messages, st.data())
def test_flipped_bytes_are_decoded_or_refused(message, data):
    body = bytearray(wire.encode(message)[1])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse([wire.HEADER, bytes(body)])


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | real | names | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["hello", "observations", "steps", "plan_offer", "nonsense"]), json_like)
def test_well_formed_msgpack_of_the_wrong_shape_is_refused(tag, anything):
    body = {"type": tag, "job_id": anything, "rank": anything, "n_records": anything, "plan": anything}
    decode_or_refuse([wire.HEADER, msgspec.msgpack.encode(body)])


def test_deep_nesting_is_refused():
    decode_or_refuse([wire.HEADER, b"\x81\xa6fabric" + b"\x91" * 1_000_000 + b"\xc0"])


@pytest.mark.parametrize("version", [0, wire.WIRE_VERSION + 1, 65535])
def test_another_version_is_named(version):
    frames = [struct.pack("<2sH", b"ZT", version), msgspec.msgpack.encode(wire.StatusRequest())]
    with pytest.raises(WireError, match=rf"version {version} is not {wire.WIRE_VERSION}"):
        wire.decode_agent(frames)


def test_oversized_frames_are_refused_before_they_are_decoded():
    with pytest.raises(WireError, match=str(wire.MAX_BODY_BYTES)):
        wire.decode_agent([wire.HEADER, bytes(wire.MAX_BODY_BYTES + 1)])
    n_records = wire.MAX_RECORDS_BYTES // wire.OBSERVATION_BYTES + 1
    frames = wire.encode(wire.Observations("j", 0, n_records), bytes(n_records * wire.OBSERVATION_BYTES))
    with pytest.raises(WireError, match=str(wire.MAX_RECORDS_BYTES)):
        wire.decode_agent(frames)


@pytest.mark.parametrize("n_records", [-1, 0, 1, 3, 2**62])
def test_a_records_frame_must_be_what_was_announced(n_records):
    with pytest.raises(WireError):
        wire.decode_agent(wire.encode(wire.Observations("j", 0, n_records), bytes(2 * wire.OBSERVATION_BYTES)))


def test_missing_and_unexpected_records_frames_are_refused():
    with pytest.raises(WireError, match="none"):
        wire.decode_agent(wire.encode(wire.Observations("j", 0, 1)))
    with pytest.raises(WireError, match="Goodbye"):
        wire.decode_agent(wire.encode(wire.Goodbye("j", 0), b""))
    with pytest.raises(WireError, match="Welcome"):
        wire.decode_daemon(wire.encode(wire.Welcome(1, "v"), b""))


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(WireError):
        wire.decode_agent(wire.encode(wire.Welcome(1, "v")))
    with pytest.raises(WireError):
        wire.decode_daemon(wire.encode(wire.StatusRequest()))


@pytest.mark.parametrize(("n_steps", "n_rows"), [(0, 1), (2, -1)])
def test_a_stage_that_makes_no_sense_is_refused(n_steps: int, n_rows: int) -> None:
    frames = wire.encode(wire.PlanOffer("job", Plan(1, then=(NextStage(1, 0),))))
    broken = msgspec.msgpack.decode(frames[1])
    broken["plan"]["then"][0] |= {"n_steps": n_steps, "n_rows": n_rows}
    with pytest.raises(WireError):
        wire.decode_daemon([frames[0], msgspec.msgpack.encode(broken), *frames[2:]])


INTEGERS = st.integers(-(2**63), -1) | st.integers(2**45 + 1, 2**64 - 1)


@settings(max_examples=100)
@given(agent_messages, st.data())
def test_a_number_out_of_its_range_is_refused(message, data):
    """Wherever it stands: every whole number of every message has limits, and every real one is finite."""
    body = msgspec.msgpack.decode(wire.encode(message)[1])
    places = [(body, key) for key, value in body.items() if type(value) in (int, float)]
    for step in body.get("steps", ()):
        places += [(step, key) for key, value in step.items() if type(value) in (int, float)]
    assume(places)
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(INTEGERS) if type(holder[key]) is int else data.draw(st.sampled_from([np.nan, np.inf]))
    with pytest.raises(WireError):
        wire.decode_agent([wire.HEADER, msgspec.msgpack.encode(body)])


@pytest.mark.parametrize(
    "kind", [(wire.Observations, OBSERVATION), (wire.Forwarded, OBSERVATION), (wire.CostTables, COST)]
)
@pytest.mark.parametrize("field", TOO_LARGE)
def test_a_record_with_a_number_out_of_its_range_is_left_out_alone(kind, field):
    message_type, dtype = kind
    records = np.zeros(5, dtype)
    records["comm_id"] = range(5)
    message = message_type("job", 3, *[2] * (message_type is wire.Forwarded), 5)
    if field in dtype.names:
        records[field][3] = TOO_LARGE[field]
    decoded, raw = wire.decode_agent(wire.encode(message, records.tobytes()))
    assert decoded == message
    used, n_left_out = wire.usable_records(message, raw)
    expected = np.delete(records, 3) if field in dtype.names else records
    assert (used.tobytes(), n_left_out) == (expected.tobytes(), 5 - len(expected))


def test_unknown_numbers_of_a_record_are_no_reason_to_refuse_it():
    records = np.zeros(2, OBSERVATION)
    records["duration_us"], records["memory_pressure"], records["message_bytes"] = np.nan, -1.0, 2**62
    used, n_left_out = wire.usable_records(wire.Observations("job", 0, 2), records.tobytes())
    assert (len(used), n_left_out) == (2, 0)
    records["message_bytes"][0] += 1
    used, n_left_out = wire.usable_records(wire.Observations("job", 0, 2), records.tobytes())
    assert (len(used), n_left_out) == (1, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"job_id": ""},
        {"job_id": "x" * 300},
        {"fabric_id": "x" * 300},
        {"rank": 70_000, "n_ranks": 80_000},
        {"fabric": {str(at): 1 for at in range(300)}},
        {"fabric": {"gpu": "x" * 5000}},
        {"fabric": {"n": 2**63}},
        {"fabric": {"x": float("inf")}},
        {"epoch": 2**31 - 1},  # the next plan's could not be said
    ],
)
def test_greetings_beyond_any_rank_of_ours_are_refused(fields):
    values = {"job_id": "job", "rank": 0, "n_ranks": 4, "fabric_id": "fabric", "fabric": {}} | fields
    hello = wire.Hello(local_rank=0, node="n", pid=1, nccl_version=1, tuner_abi=5, **values)
    with pytest.raises(WireError):
        wire.decode_agent(wire.encode(hello))


@pytest.mark.parametrize("job_id", ["a\nzerotune: fake line", "a\n", "\n", "a\0"])
def test_no_name_makes_a_line_of_its_own(job_id):
    with pytest.raises(WireError):
        wire.decode_agent(wire.encode(wire.Goodbye(job_id, 0)))
