"""Chakra execution traces: length-prefixed protobuf messages, read by a few lines of our own.

The first message is the metadata, every other one a node; only nodes of collectives matter. The wire
format needs no generated code: a field is a key (number and type), then a varint, 8 bytes, 4 bytes or a
length-prefixed piece. `comm_size` is the bytes of one rank's call: of its input, hence a shard of an all_gather
and the whole of a reduce_scatter. Chakra traces are often synthetic and often carry no times.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from zerotune.agent.nccl.catalog import find_collective
from zerotune.store.errors import TraceError
from zerotune.store.records import Collective, Observation, TimingSource
from zerotune.tuner.traces.files import Readable, opened, read_some
from zerotune.tuner.traces.pytorch.flight_recorder import rank_of
from zerotune.tuner.traces.records import (
    MAX_BYTES,
    UNKNOWN_U4,
    Block,
    SequenceNumbers,
    Summary,
    blocks_of,
    communicator_id,
    total_bytes,
)

MAX_MESSAGE_BYTES: Final = 16 << 20

_COLLECTIVE_NODE: Final = 7
_BARRIER: Final = 9
_COLLECTIVES: Final = {
    0: Collective.all_reduce,
    1: Collective.reduce,
    2: Collective.all_gather,
    3: Collective.gather,
    4: Collective.scatter,
    5: Collective.broadcast,
    6: Collective.all_to_all,
    7: Collective.reduce_scatter,
    8: Collective.reduce_scatter,
}
_NODE: Final = {"name": 2, "type": 3, "start_us": 6, "duration_us": 7, "attribute": 10}
_ATTRIBUTE_VARINTS: Final = (7, 9, 11, 13, 27)
_ATTRIBUTE_TEXT: Final = 29

Field = tuple[int, int | bytes]


def matches(begin: bytes) -> bool:
    """A length-prefixed message whose fields are those of Chakra's metadata: a version and attributes."""
    try:
        n_bytes, at = _varint(begin, 0)
        if not 0 < n_bytes <= MAX_MESSAGE_BYTES:
            return False
        fields = list(_fields(begin[at : at + n_bytes]))
    except ValueError:
        return False
    return bool(fields) and all(number in (1, 2) and isinstance(value, bytes) for number, value in fields)


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one rank."""
    yield from blocks_of(_observations(path, summary))


def _observations(path: Path, summary: Summary) -> Iterator[Observation]:
    counters = SequenceNumbers()
    rank = rank_of(path)
    with opened(path) as file:
        for index, message in enumerate(_messages(file, path, summary)):
            try:
                if index == 0:
                    version = dict(_fields(message)).get(1, b"")
                    summary.facts["schema"] = version.decode("utf-8", "replace") if isinstance(version, bytes) else ""
                    continue
                observation = _observation(message, rank, counters, summary)
            except ValueError as error:
                raise TraceError(f"{path}: message {index} is damaged ({error})", "copy the file again") from None
            if observation is not None:
                yield observation


def _messages(file: Readable, path: Path, summary: Summary) -> Iterator[bytes]:
    while True:
        n_bytes = shift = 0
        while True:
            byte = read_some(file, 1)
            if not byte:
                if shift:
                    summary.note(f"{path.name} ends early")
                return
            n_bytes |= (byte[0] & 0x7F) << shift
            shift += 7
            if byte[0] < 0x80:
                break
            if shift > 35:
                raise TraceError(f"{path} has a message of impossible length", "it is no Chakra trace")
        if n_bytes > MAX_MESSAGE_BYTES:
            raise TraceError(f"{path} has a message of {n_bytes:,} bytes", "it is no Chakra trace")
        message = read_some(file, n_bytes) if n_bytes else b""
        if len(message) < n_bytes:
            summary.note(f"{path.name} ends early")
            return
        yield message


def _observation(message: bytes, rank: int | None, counters: SequenceNumbers, summary: Summary) -> Observation | None:
    node: dict[int, Any] = {}
    attributes: dict[str, int | bytes] = {}
    for number, value in _fields(message):
        if number == _NODE["attribute"] and isinstance(value, bytes):
            attributes.update(_attribute(value))
        else:
            node[number] = value
    if node.get(_NODE["type"]) != _COLLECTIVE_NODE:
        return None
    collective = _collective(node.get(_NODE["name"]), attributes.get("comm_type"))
    if collective is None:
        summary.skip("barrier or unknown operation")
        return None
    n_bytes, n_ranks = attributes.get("comm_size"), attributes.get("pg_size", attributes.get("group_size"))
    n_ranks = n_ranks if type(n_ranks) is int and 0 < n_ranks < 1 << 31 else 0
    side = n_bytes if type(n_bytes) is int and 0 < n_bytes <= MAX_BYTES else None
    message_bytes = total_bytes(collective, side, None, n_ranks)
    if not message_bytes:
        summary.skip("bytes or ranks unknown")
        return None
    group = attributes.get("pg_name", b"")
    comm_id = communicator_id(group, n_ranks)
    duration_us, start_us = node.get(_NODE["duration_us"]), node.get(_NODE["start_us"])
    timed = type(duration_us) is int and 0 < duration_us < 1 << 40
    return Observation(
        sequence=counters.next(comm_id, collective),
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=n_ranks,
        rank=UNKNOWN_U4 if rank is None else rank,
        comm_id=comm_id,
        start_ns=start_us * 1000 if type(start_us) is int and 0 < start_us < 1 << 52 else None,
        duration_us=float(duration_us) if timed and duration_us is not None else None,
        timing_source=TimingSource.reported if timed else TimingSource.none,
    )


def _collective(name: Any, comm_type: int | bytes | None) -> Collective | None:
    if type(comm_type) is int:
        return _COLLECTIVES.get(comm_type)
    return find_collective(name.decode("utf-8", "replace")) if isinstance(name, bytes) else None


def _attribute(message: bytes) -> Iterator[tuple[str, int | bytes]]:
    name: str | None = None
    value: int | bytes | None = None
    for number, content in _fields(message):
        if number == 1 and isinstance(content, bytes):
            name = content.decode("utf-8", "replace")
        elif (number in _ATTRIBUTE_VARINTS and isinstance(content, int)) or number == _ATTRIBUTE_TEXT:
            value = content
    if name is not None and value is not None:
        yield name, value


def _fields(message: bytes) -> Iterator[Field]:
    """(number, value) of each field; fixed-width values as bytes. Raises ValueError where the message is cut."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise ValueError("field 0")
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == 2:
            n_bytes, at = _varint(message, at)
        elif kind in (1, 5):
            n_bytes = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + n_bytes > len(message):
            raise ValueError("a field is longer than its message")
        yield number, message[at : at + n_bytes]
        at += n_bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is cut")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError("a number is too long")
