"""Chakra execution traces: length-prefixed protobuf messages, read by protobuf's own library (`zerotune[chakra]`).

The first message is the metadata, and every other message is a node; only nodes of collectives are used. The needed
fields are declared here. `comm_size` is the bytes of one rank's input: a shard of an all_gather, the whole of a
reduce_scatter. Chakra traces are often synthetic and often have no times.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ....agent.nccl.catalog import find_collective
from ....store.errors import TraceError
from ....store.records import Collective, Observation, TimingSource
from ..files import TraceFile, opened
from ..left_out import LeftOut
from ..records import MAX_BYTES, UNKNOWN_U4, Block, SequenceNumbers, Summary, blocks_of, communicator_id, sized_call
from .flight_recorder import rank_of

MAX_MESSAGE_BYTES: Final = 4 << 20
"""Limit of one message's length; decoding a hostile message may take 15 times its length in memory."""

_COLLECTIVE_NODE: Final = 7
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
_BYTES: Final = 12  # protobuf's numbers of types
_MESSAGES: Final = {
    "Node": {
        "name": (2, _BYTES),
        "type": (3, 5),
        "start_us": (6, 4),
        "duration_us": (7, 4),
        "attributes": (10, _BYTES),
    },
    "Attribute": {
        "name": (1, _BYTES),
        "int32": (7, 5),
        "int64": (9, 3),
        "uint32": (11, 13),
        "uint64": (13, 4),
        "bool": (27, 8),
        "text": (29, _BYTES),
    },
}
"""Message -> field -> its number and type. Texts are bytes, as not all are UTF-8. Attributes are bytes, too, and are
decoded one at a time, as a hostile node may have millions.
"""
_VARINT: Final = rb"[\x80-\xff]{0,4}[\x01-\x7f]"
_BEGIN: Final = re.compile(
    _VARINT + rb"\n([\x02-\x7f])(\d[\w.+-]+)"  # metadata with a version
    rb"|" + _VARINT + rb"\x12" + _VARINT + rb"\n([\x02-\x7f])([\w. -]+)"  # with attributes alone
    rb"|\x00" + _VARINT + rb"(?:\x08" + _VARINT + rb")?\x12([\x02-\x7f])([\w.:<>() -]+)"  # empty, then a node
)
"""The metadata's length, then a text with its length: the version, or an attribute's or the first node's name."""


def matches(begin: bytes) -> bool:
    """Whether the file has length-prefixed messages and begins like Chakra's metadata, perhaps without a version."""
    found = _BEGIN.match(begin)
    n_bytes, text = [group for group in found.groups() if group is not None] if found else (b"\1", b"")
    return len(text) >= n_bytes[0]


@lru_cache(maxsize=1)
def message_classes() -> tuple[Any, ...]:
    """Classes of _MESSAGES, in their order; TraceError if protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise TraceError("a Chakra trace needs protobuf to be read", "pip install 'zerotune[chakra]'") from None
    file = descriptor_pb2.FileDescriptorProto(name="chakra", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            message.field.add(name=field, number=number, type=kind, label=3 if field == "attributes" else 1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return tuple(message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in _MESSAGES)


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one rank."""
    yield from blocks_of(_observations(path, summary))


def _observations(path: Path, summary: Summary) -> Iterator[Observation]:
    node_class, attribute_class = message_classes()
    from google.protobuf.message import DecodeError

    counters = SequenceNumbers()
    rank = rank_of(path)
    with opened(path) as file:
        for index, message in enumerate(_messages(file, path, summary)):
            try:
                if index == 0:
                    continue  # the metadata
                node = node_class.FromString(message)
                if node.type != _COLLECTIVE_NODE:
                    continue
                attributes = dict(_value(attribute_class.FromString(one)) for one in node.attributes)
            except DecodeError as error:
                raise TraceError(f"{path}: message {index} is damaged ({error})", "copy the file again") from None
            observation = _observation(node, attributes, rank, counters, summary, path.name)
            if observation is not None:
                yield observation


def _messages(file: TraceFile, path: Path, summary: Summary) -> Iterator[bytes]:
    for index in itertools.count():
        n_bytes = shift = 0
        while True:
            byte = file.read(1)
            if not byte:
                if shift:
                    summary.fault(f"{path.name} ends early")
                return
            n_bytes |= (byte[0] & 0x7F) << shift
            shift += 7
            if byte[0] < 0x80:
                break
            if shift > 35:
                raise TraceError(f"{path} has a message of impossible length", "it is no Chakra trace")
        if n_bytes > MAX_MESSAGE_BYTES:
            raise TraceError(f"{path} has a message of {n_bytes:,} bytes", "it is no Chakra trace")
        if not n_bytes and index:  # otherwise each zero byte would count as a node, without a limit
            raise TraceError(f"{path}: message {index} is empty, as no node is", "it is no Chakra trace")
        message = file.read(n_bytes) if n_bytes else b""
        if len(message) < n_bytes:
            summary.fault(f"{path.name} ends early")
            return
        yield message


def _observation(
    node: Any,
    attributes: dict[str, Any],
    rank: int | None,
    counters: SequenceNumbers,
    summary: Summary,
    file_name: str,
) -> Observation | None:
    kind = attributes.get("comm_type")
    named = find_collective(node.name.decode("utf-8", "replace"))
    collective = _COLLECTIVES.get(kind) if type(kind) is int else named
    if collective is None:
        summary.skip(LeftOut.barrier_or_unknown)
        return None
    n_bytes, sizes = attributes.get("comm_size"), {name: attributes.get(name) for name in ("pg_size", "group_size")}
    stated_sizes = {name: size for name, size in sizes.items() if type(size) is int and 0 < size < 1 << 31}
    side = n_bytes if type(n_bytes) is int and 0 < n_bytes <= MAX_BYTES else None
    message_bytes, n_ranks = sized_call(collective, (side, None), stated_sizes, summary, file_name)
    if not message_bytes:
        summary.skip(LeftOut.bytes_or_ranks_unknown)
        return None
    group = attributes.get("pg_name", b"")
    comm_id = communicator_id(group, n_ranks)
    timed = 0 < node.duration_us < 1 << 40
    return Observation(
        sequence=counters.next(comm_id, collective),
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=n_ranks,
        rank=UNKNOWN_U4 if rank is None else rank,
        comm_id=comm_id,
        start_ns=node.start_us * 1000 if 0 < node.start_us < 1 << 52 else None,
        duration_us=float(node.duration_us) if timed else None,
        timing_source=TimingSource.reported if timed else TimingSource.none,
    )


def _value(attribute: Any) -> tuple[str, Any]:
    """Name and value; the value is None if its type is not among our fields'."""
    values = [value for field, value in attribute.ListFields() if field.name != "name"]
    return attribute.name.decode("utf-8", "replace"), values[-1] if values else None
