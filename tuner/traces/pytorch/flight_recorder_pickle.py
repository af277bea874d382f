"""PyTorch Flight Recorder dumps as PyTorch writes them by default: pickled plain data, never unpickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ....store.errors import TraceError
from ..files import opened
from ..records import Block, Summary, blocks_of
from .flight_recorder import FACTS, observations
from .plain_pickle import MAX_PICKLE_BYTES, load_plain

_OLD: Final = (b"(dp0\n", b"(d", b"}q\0(")


def matches(begin: bytes) -> bool:
    """Whether the file is a pickle: protocol 2 and newer start with its number, older ones with a dictionary."""
    is_new = len(begin) > 2 and begin[0] == 0x80 and 2 <= begin[1] <= 5
    return is_new or (begin.startswith(_OLD) and b"version" in begin[:64])


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The collectives of one rank's dump; the file is held in memory (a dump is a bounded ring)."""
    with opened(path) as file:
        data = file.read(MAX_PICKLE_BYTES + 1)
    if len(data) > MAX_PICKLE_BYTES:
        raise TraceError(f"{path} is larger than a Flight Recorder dump can be", "name another file")
    try:
        dump = load_plain(data)
    except TraceError as error:
        raise TraceError(f"{path}: {error.problem}", error.remedy) from None
    if not isinstance(dump, Mapping) or not isinstance(dump.get("entries"), list):
        raise TraceError(f"{path} is no Flight Recorder dump", "it has no entries")
    summary.facts.update({fact: dump[key] for key, fact in FACTS.items() if key in dump})
    groups = dump.get("pg_config")
    known = groups if isinstance(groups, Mapping) else {}
    yield from blocks_of(observations(iter(dump["entries"]), known, path, summary))
