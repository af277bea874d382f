"""Computes places of parameters in a flat buffer, and the ranks that own its parts; no tensors here.

    flat buffer   | p0      | p1 |gap| p2                    | tail |
    chunks        |        chunk 0        |        chunk 1          |
    ranks         |  0  |  1  |  2  |  3  |  0  |  1  |  2  |   3   |

Parameters lie one behind another, each at an aligned offset. The buffer is cut into chunks of at most a
constant number of bytes (C_B), and each chunk into one equal slice per rank, so that one collective moves one
chunk and all ranks' shares are equal, whatever the shapes. A rank's *shard* is its slices, one behind another.
All numbers are elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

ALIGNMENT = 16  # elements: 64 bytes of fp32, 32 of bf16; keeps vector loads and 16-byte NCCL paths


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Offset behind the last element."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Chunk:
    """One collective's part `[start, start + numel)` of the flat buffer, with an equal slice for each rank."""

    start: int
    numel: int
    shard_start: int  # of this chunk's slice, within every rank's shard
    shard_numel: int

    @property
    def end(self) -> int:
        """Offset behind the last element."""
        return self.start + self.numel


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements of one parameter that one rank owns."""

    slot: int  # index into Layout.slots
    slot_offset: int  # first element, counted within the flattened parameter
    shard_offset: int  # first element, counted within the rank's shard
    numel: int


@dataclass(frozen=True)
class Layout:
    """The plan of one flat buffer."""

    slots: tuple[Slot, ...]
    chunks: tuple[Chunk, ...]
    n_ranks: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.chunks[-1].end if self.chunks else 0

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return self.numel // self.n_ranks

    @cached_property
    def n_parameters(self) -> int:
        """Elements without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - self.n_parameters

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of every range that belongs to no parameter."""
        gaps, position = [], 0
        for start, end in [(s.offset, s.end) for s in self.slots] + [(self.numel, self.numel)]:
            if start > position:
                gaps.append((position, start))
            position = end
        return tuple(gaps)

    def chunks_of(self, slot: Slot) -> range:
        """Indices of the chunks that hold a part of `slot`; empty for a parameter without elements."""
        held = [i for i, c in enumerate(self.chunks) if slot.offset < c.end and slot.end > c.start]
        return range(held[0], held[-1] + 1) if held and slot.numel else range(0)

    def rank_slice(self, chunk: Chunk, rank: int) -> tuple[int, int]:
        """(start, end) in the flat buffer of the slice of `chunk` that `rank` owns."""
        start = chunk.start + rank * chunk.shard_numel
        return start, start + chunk.shard_numel

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Pieces that `rank` owns, in the order of its shard."""
        pieces = []
        for chunk in self.chunks:
            start, end = self.rank_slice(chunk, rank)
            for index, slot in enumerate(self.slots):
                low, high = max(start, slot.offset), min(end, slot.end)
                if low < high:
                    pieces.append(Piece(index, low - slot.offset, chunk.shard_start + low - start, high - low))
        return tuple(pieces)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def plan_layout(
    named_shapes: Sequence[tuple[str, tuple[int, ...]]],
    n_ranks: int,
    max_chunk_numel: int,
    alignment: int = ALIGNMENT,
) -> Layout:
    """Lays the parameters out in their order, in chunks of nearly equal length ≤ `max_chunk_numel`.

    A chunk has at least one aligned slice per rank, even if `max_chunk_numel` is smaller. Without parameters there are
    no chunks. Every parameter and every slice begins at a multiple of `alignment` elements.
    """
    slots, offset = [], 0
    for name, shape in named_shapes:
        slots.append(Slot(name, tuple(shape), offset))
        offset = _round_up(slots[-1].end, alignment)
    unit = n_ranks * alignment
    total = _round_up(slots[-1].end if slots else 0, unit)
    largest = max(unit, max_chunk_numel // unit * unit)
    n_chunks = -(-total // largest)
    step = _round_up(-(-total // n_chunks), unit) if n_chunks else unit
    chunks: list[Chunk] = []
    for start in range(0, total, step):
        numel = min(step, total - start)
        chunks.append(Chunk(start, numel, start // n_ranks, numel // n_ranks))
    return Layout(tuple(slots), tuple(chunks), n_ranks)
