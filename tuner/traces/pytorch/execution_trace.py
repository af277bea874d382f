"""PyTorch execution traces (PARAM's and Chakra's input): the calls of one rank, without durations.

`record_param_comms` nodes have the collective: as attributes in newer schemas, as positional inputs in
older ones. Sizes are in elements. Process groups are described by one node at the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ....agent.nccl.catalog import find_collective
from ....store.errors import TraceError
from ....store.records import Observation
from ..files import JsonStream
from ..left_out import LeftOut
from ..records import (
    MAX_BYTES,
    UNKNOWN_U4,
    Block,
    SequenceNumbers,
    Summary,
    blocks_of,
    communicator_id,
    element_bytes,
    is_impossible,
    sized_call,
)
from .flight_recorder import rank_of

_GROUPS_NODE: Final = "## process_group:init ##"
_CALL_NODE: Final = "record_param_comms"
_NOT_COLLECTIVES: Final = ("wait", "init", "barrier")


def matches(begin: bytes) -> bool:
    """Whether the file is an object whose schema names Chakra, or that has PyTorch's node fields."""
    return begin.lstrip().startswith(b"{") and b'"schema"' in begin[:512] and b'"nodes"' in begin


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one rank."""
    yield from blocks_of(_observations(path, summary))


def _observations(path: Path, summary: Summary) -> Iterator[Observation]:
    stream = JsonStream(path, ("nodes",))
    counters = SequenceNumbers()
    group_sizes: dict[str, int] = {}
    rank = rank_of(path)
    seen = False
    for key, value in stream.members():
        if key != "nodes" or not isinstance(value, Iterator):
            continue
        seen = True
        for node in value:
            if not isinstance(node, Mapping):
                continue
            if node.get("name") == _GROUPS_NODE:
                group_sizes.update(_groups(node))
            elif node.get("name") == _CALL_NODE:
                observation = _observation(node, group_sizes, rank, counters, summary, path.name)
                if observation is not None:
                    yield observation
    if stream.truncated:
        summary.fault(f"{path.name} ends early")
    elif not seen:
        raise TraceError(f"{path} has no nodes", "name a PyTorch execution trace")


def _groups(node: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Group name or backend id -> ranks in it."""
    values = _values(node, "inputs")
    try:
        groups = json.loads(values[0]) if values and isinstance(values[0], str) else []
    except (ValueError, RecursionError):
        return
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, Mapping):
            continue
        n_ranks = group.get("group_size")
        if type(n_ranks) is int and 0 < n_ranks < 1 << 31:
            for key in ("pg_name", "backend_id"):
                if isinstance(group.get(key), str | int):
                    yield str(group[key])[:200], n_ranks


_SIZES: Final = ("in_msg_nelems", "out_msg_nelems")


def _observation(
    node: Mapping[str, Any],
    group_sizes: Mapping[str, int],
    rank: int | None,
    counters: SequenceNumbers,
    summary: Summary,
    file_name: str,
) -> Observation | None:
    attributes = _attributes(node)
    name, group, n_ranks = attributes.get("collective_name"), attributes.get("pg_name"), attributes.get("pg_size")
    dtype = attributes.get("dtype")
    if isinstance(name, str):
        elements = [_count(attributes.get(key)) for key in _SIZES]
    else:
        name, group = _positional(node)
        dtype = _tensor_type(node, "inputs")
        elements = [_shape_elements(node, side) for side in ("inputs", "outputs")]
    collective = find_collective(name) if isinstance(name, str) else None
    if collective is None:
        known = name in _NOT_COLLECTIVES
        summary.skip(LeftOut.not_a_collective if known else LeftOut.unknown_operation)
        return None
    group_name = str(group)[:200] if isinstance(group, str | int) else ""
    by_source = {
        "its call": n_ranks if type(n_ranks) is int and 0 < n_ranks < 1 << 31 else 0,
        "its group": group_sizes.get(group_name),
    }
    width = element_bytes(dtype)
    if isinstance(attributes.get("collective_name"), str) and any(is_impossible(attributes.get(key)) for key in _SIZES):
        summary.skip(LeftOut.impossible_size)
        return None
    sides = [None if count is None or width is None or not count else count * width for count in elements]
    message_bytes, n_ranks = sized_call(collective, sides, by_source, summary, file_name)
    if not message_bytes:
        summary.skip(LeftOut.bytes_unknown)
        return None
    comm_id = communicator_id(group_name, n_ranks)
    return Observation(
        sequence=counters.next(comm_id, collective),
        collective=collective,
        message_bytes=message_bytes,
        n_ranks=n_ranks,
        rank=UNKNOWN_U4 if rank is None else rank,
        comm_id=comm_id,
        datatype=dtype if isinstance(dtype, str) else None,
    )


def _attributes(node: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of a node's attribute list."""
    listed = node.get("attrs", node.get("attr"))
    return {
        entry["name"]: entry.get("value")
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
    }


def _values(node: Mapping[str, Any], side: str) -> list[Any]:
    part = node.get(side)
    values = part.get("values") if isinstance(part, Mapping) else None
    return values if isinstance(values, list) else []


def _positional(node: Mapping[str, Any]) -> tuple[Any, Any]:
    """Inputs of older schemas: [tensors, sequence, group, rank, name, ...], of which tensors may be missing."""
    values = _values(node, "inputs")
    for position in (4, 3):
        if len(values) > position and isinstance(values[position], str):
            group = values[position - 2]
            return values[position], group[0] if isinstance(group, list) and group else group
    return None, None


def _tensor_type(node: Mapping[str, Any], side: str) -> str | None:
    """`float` from `GenericList[Tensor(float)]`."""
    part = node.get(side)
    types = part.get("types") if isinstance(part, Mapping) else None
    text = types[0] if isinstance(types, list) and types and isinstance(types[0], str) else ""
    return text.partition("Tensor(")[2].partition(")")[0] or None


def _shape_elements(node: Mapping[str, Any], side: str) -> int | None:
    """Elements of all tensors of the first argument, however nested."""
    part = node.get(side)
    shapes = part.get("shapes") if isinstance(part, Mapping) else None
    if not isinstance(shapes, list) or not shapes:
        return None
    total = _nested_elements(shapes[0], 0)
    return total if total is not None and total <= MAX_BYTES else None


def _nested_elements(shape: Any, depth: int) -> int | None:
    if not isinstance(shape, list) or depth > 4:
        return None
    if all(type(extent) is int and 0 <= extent <= MAX_BYTES for extent in shape):
        return math.prod(shape[:64]) if shape else 0
    total = 0
    for inner in shape:
        elements = _nested_elements(inner, depth + 1)
        if elements is None:
            return None
        total += elements
    return total


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_BYTES else None
