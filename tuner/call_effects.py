"""Effects of changed environments on calls of other nodes with the same hardware: a file beside the store.

The daemon writes it whenever it reads a book, and the launcher reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from ..store.atomic_file import atomic_write
from ..store.foreign.regular_file import read_file
from .same_machine import Facts

MAX_BYTES: Final = 16 << 20
MOST_LOG: Final = 10.0
"""Largest effect (log) that is written or believed."""


class CallEffect(msgspec.Struct, frozen=True):
    """How a change affects calls with NCCL's own choices."""

    hardware: dict[str, str | int | float | bool]
    """As `hardware_of` describes it."""
    change: str
    """`NAME=VALUE`, the value in small letters as facts have it."""
    longer: Annotated[float, msgspec.Meta(ge=-MOST_LOG, le=MOST_LOG)]
    """Duration over the usual one (log)."""
    longer_std: Annotated[float, msgspec.Meta(ge=0.0, le=MOST_LOG)]
    """Standard deviation over kinds of calls."""
    n_contributors: Annotated[int, msgspec.Meta(ge=1)]


def write_effects(store_file: Path, effects: Sequence[CallEffect]) -> None:
    """Replace the file beside a store; OSError if it cannot be written."""
    with atomic_write(_beside(store_file)) as partial:
        partial.write_bytes(msgspec.json.encode(effects))


def effects_on(store_file: Path, hardware: Facts) -> list[CallEffect]:
    """Effects of changes on this hardware; empty if the file beside the store is missing or damaged."""
    try:
        data = read_file(_beside(store_file), MAX_BYTES)
        effects = msgspec.json.decode(data, type=list[CallEffect])
    except (OSError, ValueError, RecursionError):
        return []
    return [one for one in effects if one.hardware == hardware]


def _beside(store_file: Path) -> Path:
    return store_file.with_name(f"{store_file.name}.elsewhere.json")
