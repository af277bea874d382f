"""A book: the fleet's merged measurements in one readable file, which a daemon uses only with a valid signature.

A book is text with one JSON object per line. The first has the format, the key and the ed25519 signature of the rest.
Then come a head, the fabrics, the contributors, the refused objects, and the cells, sorted.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, NamedTuple

import msgspec

from ...agent.nccl.catalog import legal_cells
from ...store.errors import BookError
from ...store.records import (
    SIZE_CLASSES_PER_OCTAVE,
    U32,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class_range,
)
from .signing import Signer, Verifier

FORMAT: Final = 1
MAX_BYTES: Final = 256 * 2**20
MAX_LINE_BYTES: Final = 2**18
"""Bytes of one line; a fabric's facts have at most half of it."""
MAX_LINES: Final = 2**20
"""Most lines; a full book of cells has fewer."""
MAX_FABRICS: Final = 2**14
MAX_FACTS: Final = 256
"""Facts of one fabric."""
MAX_GAIN: Final = 5.0
"""Largest gain (log); no setting is 150 times as fast as NCCL's own choice."""
_DOMAIN: Final = b"zerotune store book 1\n"
"""Beginning of the signed bytes, so that no signature of other data fits."""

Text = Annotated[str, msgspec.Meta(max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Share = Annotated[float, msgspec.Meta(ge=0, le=100)]
"""Spreads, as logs of ratios."""
Log = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Micros = Annotated[float, msgspec.Meta(gt=0, le=1e10)]


class Head(msgspec.Struct, frozen=True, tag="head"):
    """The origin of a book."""

    url: Text
    made_at_s: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    made_by: Text
    n_objects: Count
    n_rows: Count
    n_jobs: Count


class FabricLine(msgspec.Struct, frozen=True, tag="fabric"):
    """A fabric in the book."""

    fabric_id: Text
    facts: Annotated[dict[str, str | int | float | bool], msgspec.Meta(max_length=MAX_FACTS)]


class Contributor(msgspec.Struct, frozen=True, tag="contributor", kw_only=True, omit_defaults=True):
    """A contributor on a fabric, and whether its measurements were used."""

    fabric_id: Text
    name: Text
    """Its own name, or its name in a list of contributors; names are not unique."""
    key: Text = ""
    """Key that signed its measurements, in hexadecimal; empty: signatures were not checked."""
    n_jobs: Count = 0
    n_cells: Count = 0
    n_judged: Count = 0
    """Its cells that most others measured, too, if three or more did."""
    n_outlying: Count = 0
    n_refused_rows: Count = 0
    """Rows with impossible numbers, on all fabrics."""
    level: Log = 0.0
    """Median ratio (log) of its times to those of others."""
    is_level_off: bool = False
    is_set_aside: bool = False

    @property
    def shown(self) -> str:
        """Its name, and the beginning of its key, long enough that nobody can make another key with it."""
        return f"{self.name} ({self.key[:16]})" if self.key else self.name


class Skipped(msgspec.Struct, frozen=True, tag="skipped"):
    """A refused object."""

    path: Text
    reason: Text


class Cell(msgspec.Struct, frozen=True, tag="cell", kw_only=True):
    """One setting at one key, with the merged measurements of all jobs."""

    fabric_id: Text
    nccl_version: U32
    tuner_abi: U32
    n_ranks: U32
    n_nodes: U32
    collective: Text
    phase: Text
    size_class: Annotated[int, msgspec.Meta(ge=0, le=62 * SIZE_CLASSES_PER_OCTAVE)]
    algorithm: Text
    protocol: Text
    n_channels: Annotated[int, msgspec.Meta(ge=1, le=64)]
    is_default: bool
    """Whether NCCL chose the setting."""
    median_us: Micros
    """Median at the network's usual level."""
    spread: Share
    """Standard deviation (log) of one call."""
    between_jobs: Share
    """Standard deviation (log) of jobs' medians."""
    n_calls: Count
    n_jobs: Count
    n_contributors: Count
    gain: Annotated[float, msgspec.Meta(ge=-MAX_GAIN, le=MAX_GAIN)] | None
    """Gain (log) over NCCL's own choice in the same jobs; None if that was not measured."""
    gain_std: Share | None
    is_winner: bool

    @property
    def key(self) -> DecisionKey:
        """The cell's decision key; KeyError if there is no such collective or phase."""
        communicator = CommunicatorClass(self.n_ranks, self.n_nodes)
        return DecisionKey(communicator, Collective[self.collective], Phase[self.phase], self.size_class)

    @property
    def candidate(self) -> Candidate:
        """The setting; KeyError if there is no such algorithm or protocol."""
        return Candidate(Algorithm[self.algorithm], Protocol[self.protocol], self.n_channels)

    @property
    def bytes_range(self) -> tuple[int, int]:
        """Smallest and largest message bytes, both inclusive."""
        return size_class_range(self.size_class)


Line = Head | FabricLine | Contributor | Skipped | Cell


class Book(NamedTuple):
    """The content of a book."""

    head: Head
    fabrics: tuple[FabricLine, ...]
    contributors: tuple[Contributor, ...]
    skipped: tuple[Skipped, ...]
    cells: tuple[Cell, ...]
    n_unusable: int = 0
    """Invalid lines, which are left out."""
    signed_by: str = ""
    """Public key in hexadecimal; empty: unsigned. Only `opened` with a verifier checks it."""

    def winners(self, fabric_id: str | None = None) -> Iterator[Cell]:
        """Cells that beat NCCL's own choice, at most one per key; `fabric_id` None: on all fabrics."""
        return (one for one in self.cells if one.is_winner and fabric_id in (None, one.fabric_id))


class _Seal(msgspec.Struct, frozen=True):
    zerotune_book: int
    key: Text = ""
    signature: Text = ""


_lines: Final = msgspec.json.Decoder(Line)
_seals: Final = msgspec.json.Decoder(_Seal)


def sealed(lines: Iterable[Line], signer: Signer | None) -> bytes:
    """The bytes of a book's file; daemons refuse an unsigned one."""
    body = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    seal = _Seal(FORMAT) if signer is None else _Seal(FORMAT, signer.public_hex, signer.sign(_DOMAIN + body))
    return msgspec.json.encode(seal) + b"\n" + body


def opened(data: bytes, name: str, verifier: Verifier | None = None) -> Book:
    """The book in a file's bytes; invalid lines are left out and counted.

    Without a verifier, signatures are not checked.

    Raises:
        BookError: it is no book, of a newer format, too large, or not signed by that key.
    """
    first, _, body = data.partition(b"\n")
    if len(data) > MAX_BYTES or body.count(b"\n") > MAX_LINES:
        raise BookError(f"{name} has over {MAX_BYTES >> 20} MiB, or {MAX_LINES:,} lines", "build it of fewer fabrics")
    try:
        seal = _seals.decode(first)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BookError(f"{name} is no book", "make one with `zerotune store book build`") from error
    if seal.zerotune_book != FORMAT:
        raise BookError(f"{name} is of format {seal.zerotune_book}", f"this zerotune reads format {FORMAT}")
    if verifier is not None and not verifier.is_signed(seal.key, seal.signature, _DOMAIN + body):
        if seal.key == verifier.public_hex:
            raise BookError(f"{name} was cut or changed since it was signed", "copy it again from where it was built")
        who = f"by {seal.key[:16]}" if seal.key else "by nobody"
        raise BookError(f"{name} is signed {who}, not by {verifier.public_hex[:16]}", "name its own --book-key")
    return _opened(body, name, seal.key.lower())  # keys ignore case


def _opened(body: bytes, name: str, signed_by: str) -> Book:
    found: dict[type, list[Line]] = {kind: [] for kind in (Head, FabricLine, Contributor, Skipped, Cell)}
    n_unusable = 0
    for text in io.BytesIO(body):  # one at a time, as a book may be only line ends
        try:
            line = _lines.decode(text) if len(text) <= MAX_LINE_BYTES else None
            if line is None or (isinstance(line, Cell) and not _is_possible(line)):
                raise ValueError
            if isinstance(line, FabricLine) and len(found[FabricLine]) == MAX_FABRICS:
                raise ValueError
        except (ValueError, KeyError, RecursionError):  # MsgspecError is a ValueError
            n_unusable += 1
            continue
        found[type(line)].append(line)
    heads = found[Head]
    if len(heads) != 1 or not isinstance(heads[0], Head):
        raise BookError(f"{name} has {len(heads)} heads", "make a new one with `zerotune store book build`")
    return Book(
        heads[0],
        tuple(one for one in found[FabricLine] if isinstance(one, FabricLine)),
        tuple(one for one in found[Contributor] if isinstance(one, Contributor)),
        tuple(one for one in found[Skipped] if isinstance(one, Skipped)),
        tuple(one for one in found[Cell] if isinstance(one, Cell)),
        n_unusable,
        signed_by,
    )


def _is_possible(cell: Cell) -> bool:
    """Whether NCCL can run the cell's setting."""
    candidate, key = cell.candidate, cell.key
    cells = legal_cells(key.collective, n_nodes=cell.n_nodes, n_ranks=cell.n_ranks)
    has_gain = cell.gain is not None and cell.gain_std is not None
    return (candidate.algorithm, candidate.protocol) in cells and (has_gain or not cell.is_winner)
