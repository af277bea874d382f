"""The subjects of decisions: phases of a step, classes of message sizes, and keys made of them."""

from __future__ import annotations

import math
from enum import IntEnum
from functools import cache
from typing import Annotated, Final

import msgspec

from .nccl import Collective, CommunicatorClass


class Phase(IntEnum):
    """The part of the training step in which a collective runs."""

    other = 0
    forward_gather = 1
    backward_gather = 2
    gradient_scatter = 3
    post_step_gather = 4


SIZE_CLASSES_PER_OCTAVE: Final = 4
SizeClass = Annotated[int, msgspec.Meta(ge=0, lt=64 * SIZE_CLASSES_PER_OCTAVE)]


def size_class(message_bytes: int) -> int:
    """Index of the quarter octave that holds `message_bytes`; exact at powers of two."""
    if message_bytes < 1:
        raise ValueError(f"message_bytes {message_bytes} is not positive")
    octave = message_bytes.bit_length() - 1
    quarter = 0
    for step in range(1, SIZE_CLASSES_PER_OCTAVE):
        if message_bytes >= size_class_floor(octave * SIZE_CLASSES_PER_OCTAVE + step):
            quarter = step
    return octave * SIZE_CLASSES_PER_OCTAVE + quarter


@cache
def size_class_floor(index: int) -> int:
    """Smallest `message_bytes` of size class `index`."""
    octave, quarter = divmod(index, SIZE_CLASSES_PER_OCTAVE)
    return math.ceil(float(2.0 ** (octave + quarter / SIZE_CLASSES_PER_OCTAVE)))


def size_class_range(index: int) -> tuple[int, int]:
    """Smallest and largest `message_bytes` of size class `index`, both inclusive."""
    return size_class_floor(index), size_class_floor(index + 1) - 1


class DecisionKey(msgspec.Struct, frozen=True, order=True):
    """The subject of one decision."""

    communicator: CommunicatorClass
    collective: Collective
    phase: Phase
    size_class: SizeClass


def phase_name(phase: Phase | None) -> str:
    """The phase of a plan's row, as tables and plan files name it."""
    return "any" if phase is None else phase.name
