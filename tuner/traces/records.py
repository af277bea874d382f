"""The results of every importer: blocks of observations, and a summary of a file.

Blocks are numpy arrays of `zerotune.store.wire.OBSERVATION_FIELDS`, the same 72 bytes that the plugin records.
Unknown values: n_ranks, n_nodes, n_channels and start_ns 0; rank and step all ones; duration_us negative;
algorithm, protocol and datatype 255; memory_pressure NaN. No unknown value is guessed.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...store.records import Algorithm, Collective, Observation, Phase, Protocol, TimingSource
from ...store.wire import FLAG_TIMED, OBSERVATION_FIELDS
from .extents import Extent
from .left_out import LeftOut
from .rank_count import RankCount, agreed

Block = NDArray[np.void]

OBSERVATION: Final = np.dtype(OBSERVATION_FIELDS)
BLOCK_ROWS: Final = 65536
UNKNOWN_U1: Final = 255
UNKNOWN_U4: Final = 0xFFFFFFFF
MAX_BYTES: Final = 1 << 50
"""A larger message means that the file is damaged."""

MAX_REMARKS: Final = 100
"""Most notes that are kept, so that a hostile file cannot fill memory."""

MAX_EXAMPLES: Final = 3
MAX_CHANNELS: Final = 255
"""Most channels of a record; NCCL has 64, RCCL more."""

FLAG_FORCED: Final = 64
"""The file says that this setting was requested."""
FLAG_COUNTED: Final = 32
"""The record's number is its place among its rank's calls, as the file does not number them."""
FLAG_DEFAULT: Final = 128
"""The file says that NCCL chose this setting."""

DATATYPES: Final = (
    ("int8", 1), ("uint8", 1), ("int32", 4), ("uint32", 4), ("int64", 8), ("uint64", 8), ("float16", 2),
    ("float32", 4), ("float64", 8), ("bfloat16", 2), ("float8_e4m3", 1), ("float8_e5m2", 1),
)  # fmt: skip
"""NCCL's `ncclDataType_t` in order: name and bytes."""

_DATATYPE_NAMES: Final[Mapping[str, int]] = {
    **{name: index for index, (name, _) in enumerate(DATATYPES)},
    **{
        "char": 0, "signedchar": 0, "byte": 1, "unsignedchar": 1, "bool": 1, "int": 2, "unsignedint": 3,
        "long": 4, "longint": 4, "unsignedlong": 5, "half": 6, "float": 7, "double": 8, "bf16": 9, "fp16": 6,
        "fp32": 7, "fp64": 8, "f16": 6, "f32": 7, "f64": 8, "c10::half": 6, "c10::bfloat16": 9,
        "float8e4m3fn": 10, "float8e5m2": 11, "float8e4m3": 10, "fp8e4m3": 10, "fp8e5m2": 11, "f8e4m3": 10,
        "f8e5m2": 11, "longlong": 4, "int32t": 2, "int64t": 4, "int8t": 0, "uint8t": 1,
    },
}  # fmt: skip


def datatype_index(name: str) -> int | None:
    """NCCL's number of a data type in any spelling (`BFloat16`, `ncclFloat32`, `torch.half`); None if unknown."""
    key = name.strip().lower().removeprefix("torch.").removeprefix("nccl").replace("_", "").replace(" ", "")
    return _DATATYPE_NAMES.get(key)


def datatype_bytes(index: int) -> int | None:
    """Bytes of one element of NCCL's data type `index`; None if there is no such type."""
    return DATATYPES[index][1] if 0 <= index < len(DATATYPES) else None


def element_bytes(name: Any) -> int | None:
    """Bytes of one element of a data type by name; None if the name is unknown, or no text."""
    index = datatype_index(name) if isinstance(name, str) else None
    return None if index is None else datatype_bytes(index)


POINT_TO_POINT: Final = (Collective.send, Collective.recv, Collective.send_recv)
_JOINING: Final = (Collective.all_gather, Collective.gather)
_DIVIDING: Final = (Collective.reduce_scatter, Collective.scatter)


def total_bytes(collective: Collective, in_bytes: int | None, out_bytes: int | None, n_ranks: int | None) -> int | None:
    """NCCL's total message bytes, from input and output of one rank's call; None: unknown.

    If ranks have shards, the total counts all of them: the larger side, or the smaller side times the ranks (a
    gather's or scatter's larger side exists only on its root).
    """
    if collective in (*_JOINING, *_DIVIDING):
        shard, whole = in_bytes, out_bytes
        if collective in _DIVIDING:
            shard, whole = out_bytes, in_bytes
        if whole is None and shard is not None and n_ranks is not None and 0 < n_ranks <= MAX_BYTES:
            whole = shard * n_ranks
        in_bytes, out_bytes = (None, None) if whole is None else (whole, shard)
    known = [side for side in (in_bytes, out_bytes) if side is not None]
    return max(known) if known and max(known) <= MAX_BYTES else None


def sized_call(
    collective: Collective,
    sides: Sequence[int | None],
    by_source: Mapping[str, int | None],
    summary: Summary,
    file_name: str,
) -> tuple[int | None, int]:
    """Total bytes and ranks of one rank's call, from all sources of its ranks, and the bytes of input and output.

    The ranks are 0 if they are unknown, or if sources contradict each other, which the summary notes.
    """
    small, large = sorted(side or 0 for side in sides)
    implied = large // small if collective in (*_JOINING, *_DIVIDING) and small and large % small == 0 else None
    count = agreed({**by_source, f"the sizes of its {collective.name}": implied})
    summary.note_ranks(count, file_name)
    in_bytes, out_bytes = sides
    return total_bytes(collective, in_bytes, out_bytes, count.n_ranks), count.n_ranks


def is_impossible(n_elements: Any) -> bool:
    """Whether the value is a number below 0 or above MAX_BYTES."""
    return isinstance(n_elements, int | float) and not 0 <= n_elements <= MAX_BYTES


def communicator_id(*words: object) -> int:
    """A 64-bit id from a communicator's identifying values, equal on all of its ranks."""
    text = "\0".join(str(word) for word in words).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _add(text: str, remarks: list[str]) -> None:
    if text in remarks:
        return
    if len(remarks) < MAX_REMARKS:
        remarks.append(text)
    else:
        remarks[-1] = "and more remarks"


@dataclass
class Summary:
    """Found records, and unusable ones with reasons; reading blocks fills it in."""

    n_files: int = 0
    n_records: int = 0
    n_timed: int = 0
    """Records with a duration."""
    n_settings: int = 0
    """Records with an algorithm and a protocol."""
    n_joined: int = 0
    """Timed records of single ranks that were joined to measurements; 0 if the format needs no joining."""
    unusable: Counter[LeftOut] = field(default_factory=Counter)
    """Reason -> how many entries were left out."""
    examples: dict[LeftOut, list[str]] = field(default_factory=dict)
    """Reason -> its first entries in words, if they add to the reason."""
    faults: list[str] = field(default_factory=list)
    """Notes on files that are damaged, truncated or no trace."""
    notes: list[str] = field(default_factory=list)
    collective: Collective | None = None
    """The collective that the user names, for files that name none."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The file's facts besides records: versions, model tables, hardware."""
    columns_found: str = ""
    """The column names of a table; empty: no table."""
    fabrics: list[str] = field(default_factory=list)
    """The fabric ids under which its measurements are recorded."""
    extents: list[Extent] = field(default_factory=list)
    is_named_after_folder: bool = False
    """Whether some fabric ids are only the folder's name."""

    @property
    def remarks(self) -> list[str]:
        """Faults, and then notes."""
        return [*self.faults, *self.notes]

    def fault(self, text: str) -> None:
        """Add a file's fault; limited like `note`."""
        _add(text, self.faults)

    def note(self, text: str) -> None:
        """Add a note once; only the first MAX_REMARKS are kept."""
        _add(text, self.notes)

    def skip(self, reason: LeftOut, n_entries: int = 1, *examples: str) -> None:
        """Count entries that cannot be used (0: counted elsewhere), and keep the first examples per reason."""
        if n_entries:
            self.unusable[reason] += n_entries
        for example in examples:
            known = self.examples.setdefault(reason, [])
            if example not in known and len(known) < MAX_EXAMPLES:
                known.append(example)

    def with_examples(self, reason: LeftOut) -> str:
        """The reason, with the first examples."""
        return ", such as ".join(filter(None, (reason.value, ", ".join(self.examples.get(reason, ())))))

    def note_ranks(self, count: RankCount, file_name: str) -> None:
        """Note an error in a file's ranks, or why their number is unknown."""
        if count.remark:
            self.note(f"{file_name}: {count.remark}")
        if count.contradiction:
            self.skip(LeftOut.ranks_unknown, 0, f"{file_name}: {count.contradiction}")
            self.note(f"{file_name}: {count.contradiction}")

    def count(self, block: Block) -> None:
        """Add a block's records to the totals."""
        self.n_records += len(block)
        self.n_timed += int(np.count_nonzero(block["duration_us"] >= 0))
        self.n_settings += int(np.count_nonzero(block["algorithm"] != UNKNOWN_U1))


def empty_block(n_rows: int) -> Block:
    """`n_rows` records with only unknown values."""
    block = np.zeros(n_rows, OBSERVATION)
    block["duration_us"] = -1.0
    block["memory_pressure"] = np.nan
    for name in ("algorithm", "protocol", "datatype"):
        block[name] = UNKNOWN_U1
    for name in ("rank", "step"):
        block[name] = UNKNOWN_U4
    return block


def blocks_of(observations: Iterator[Observation]) -> Iterator[Block]:
    """Blocks from single records, of at most BLOCK_ROWS."""
    while rows := list(itertools.islice(observations, BLOCK_ROWS)):
        yield from_observations(rows)


def from_observations(observations: Sequence[Observation]) -> Block:
    """One block of the given records."""
    block = empty_block(len(observations))

    def column(name: str, unknown: Any) -> list[Any]:
        values = [getattr(one, name) for one in observations]
        return [unknown if value is None else value for value in values]

    for name in ("comm_id", "message_bytes", "sequence", "epoch", "n_ranks", "rank", "collective", "phase"):
        block[name] = [getattr(one, name) for one in observations]
    block["timing_source"] = [one.timing_source for one in observations]
    for name, unknown in (
        ("start_ns", 0), ("duration_us", -1.0), ("n_nodes", 0), ("algorithm", UNKNOWN_U1), ("protocol", UNKNOWN_U1),
        ("n_channels", 0), ("memory_pressure", math.nan), ("step", UNKNOWN_U4),
    ):  # fmt: skip
        block[name] = column(name, unknown)
    datatypes = {name: datatype_index(name or "") for name in {one.datatype for one in observations}}
    block["datatype"] = [UNKNOWN_U1 if (at := datatypes[one.datatype]) is None else at for one in observations]
    block["flags"] = np.where(block["duration_us"] >= 0, FLAG_TIMED, 0)
    return block


def to_observations(block: Block) -> Iterator[Observation]:
    """Single records of a block; unknown values become None."""
    for row in block:
        algorithm, protocol = int(row["algorithm"]), int(row["protocol"])
        duration_us, pressure = float(row["duration_us"]), float(row["memory_pressure"])
        datatype = int(row["datatype"])
        yield Observation(
            sequence=int(row["sequence"]),
            collective=Collective(int(row["collective"])),
            message_bytes=int(row["message_bytes"]),
            n_ranks=int(row["n_ranks"]),
            rank=0 if row["rank"] == UNKNOWN_U4 else int(row["rank"]),
            comm_id=int(row["comm_id"]),
            n_nodes=int(row["n_nodes"]) or None,
            phase=Phase(int(row["phase"])),
            datatype=DATATYPES[datatype][0] if datatype < len(DATATYPES) else None,
            algorithm=None if algorithm == UNKNOWN_U1 else Algorithm(algorithm),
            protocol=None if protocol == UNKNOWN_U1 else Protocol(protocol),
            n_channels=int(row["n_channels"]) or None,
            start_ns=int(row["start_ns"]) or None,
            duration_us=duration_us if duration_us >= 0 else None,
            timing_source=TimingSource(int(row["timing_source"])),
            memory_pressure=None if math.isnan(pressure) else pressure,
            epoch=int(row["epoch"]),
            step=None if row["step"] == UNKNOWN_U4 else int(row["step"]),
        )


class SequenceNumbers:
    """Running sequence numbers per key, for formats that have none."""

    def __init__(self) -> None:
        self._next: Counter[tuple[int, int]] = Counter()

    def next(self, comm_id: int, collective: int) -> int:
        """0, 1, 2 ... per (communicator, collective)."""
        return self.take(comm_id, collective, 1)

    def take(self, comm_id: int, collective: int, n_records: int) -> int:
        """Take several consecutive numbers at once; returns the first."""
        first = self._next[comm_id, collective]
        self._next[comm_id, collective] = first + n_records
        return first
