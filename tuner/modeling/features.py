"""Decision keys and settings as integers.

Arguments of the array functions are numbers or arrays of one shape, which is also that of the result.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ...agent.nccl import cost_model
from ...store.records import (
    SIZE_CLASSES_PER_OCTAVE,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class_floor,
)

FEATURES_VERSION: Final = 1
"""Increased by every change after which an earlier model would read its inputs differently."""

N_SIZE_CLASSES: Final = 64 * SIZE_CLASSES_PER_OCTAVE
NO_CELL: Final = 255
"""Algorithm or protocol byte of a measurement whose setting is unknown."""
DEFAULT_CELL: Final = (NO_CELL, NO_CELL)


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FLOORS: Final = np.array([size_class_floor(index) for index in range(N_SIZE_CLASSES)], dtype=np.uint64)


def size_classes(message_bytes: npt.ArrayLike) -> Ints:
    """Size class of every entry, as `zerotune.store.records.size_class`; entries must be positive."""
    found = np.searchsorted(_FLOORS, np.asarray(message_bytes, dtype=np.uint64), side="right") - 1
    return found.astype(np.int64)


def key_codes(
    n_ranks: npt.ArrayLike,
    n_nodes: npt.ArrayLike,
    collective: npt.ArrayLike,
    phase: npt.ArrayLike,
    classes: npt.ArrayLike,
) -> Ints:
    """One integer per decision key: 20 bits ranks, 20 nodes, 4 collective, 3 phase, 8 size class."""

    def wide(values: npt.ArrayLike) -> Ints:
        return np.asarray(values).astype(np.int64)

    code = wide(n_ranks) << 20 | wide(n_nodes)
    return (code << 4 | wide(collective)) << 11 | wide(phase) << 8 | wide(classes)


def key_of(code: int) -> DecisionKey:
    """The decision key of an integer made by `key_codes`."""
    shape = code >> 15
    return DecisionKey(
        CommunicatorClass(n_ranks=shape >> 20, n_nodes=shape & 0xFFFFF),
        Collective(code >> 11 & 0xF),
        Phase(code >> 8 & 0x7),
        code & 0xFF,
    )


def channels_filled(
    collective: npt.ArrayLike, protocol: npt.ArrayLike, message_bytes: npt.ArrayLike, n_channels: npt.ArrayLike
) -> Floats:
    """`cost_model.channels_filled` for arrays: the requested channels that a call's traffic fills, with fractions.

    `message_bytes` is NCCL's nBytes, the whole buffer.
    """
    traffic_bytes = np.asarray(message_bytes, dtype=np.float64) * np.where(
        np.asarray(collective) == int(Collective.all_reduce), 2.0, 1.0
    )
    traffic_bytes = traffic_bytes * np.where(np.asarray(protocol) == int(Protocol.ll), 4.0, 1.0)
    filled: Floats = np.maximum(1.0, np.minimum(n_channels, traffic_bytes / cost_model.TRAFFIC_PER_CHANNEL_BYTES))
    return filled


def cell_of(candidate: Candidate) -> tuple[int, int]:
    """(algorithm, protocol) as bytes; `DEFAULT_CELL` if NCCL chooses both.

    An unknown protocol is `NO_CELL`.
    """
    if candidate.algorithm is None:
        return DEFAULT_CELL
    return int(candidate.algorithm), NO_CELL if candidate.protocol is None else int(candidate.protocol)


