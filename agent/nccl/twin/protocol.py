"""Requests to a twin's processes and their answers: JSON lines on standard input and output."""

from __future__ import annotations

from typing import Final

import msgspec

from ....store.records import Algorithm, Collective, Phase, PlanRow, Protocol
from .search import Search

FAILED: Final = 1
"""Exit code of a process after an error, which it prints on standard error."""
USER_ERROR: Final = 2
"""Exit code after an error that the user can correct."""


class Question(msgspec.Struct, frozen=True):
    """One collective call."""

    collective: Collective
    message_bytes: int
    """NCCL's nBytes: the total over ranks for all_gather and reduce_scatter."""
    average: bool = False
    phase: Phase = Phase.other


def duration_us(place: int) -> float:
    """Duration of the kernel of the question at `place`, if kernels are observed: different for each."""
    return 20.0 + 0.25 * place


class NodeRequest(msgspec.Struct, frozen=True):
    """A request to one node's process."""

    library: str
    topology: str
    n_nodes: int
    ranks_per_node: int
    node: int
    questions: tuple[Question, ...]
    rows: tuple[PlanRow, ...] = ()
    """A plan in force while the questions are asked."""
    observe: bool = False
    """Whether NCCL's profiler observes kernels, each of which takes `duration_us` of its question."""
    search: bool = False
    """Whether to return the result of NCCL's topology search."""
    unique_id: str = ""
    """Hexadecimal; empty for node 0, which makes the id."""


class Cell(msgspec.Struct, frozen=True):
    """A cell of NCCL's cost table."""

    algorithm: Algorithm
    protocol: Protocol
    cost_us: float


class Ran(msgspec.Struct, frozen=True):
    """A kernel, as NCCL's profiler reported it."""

    algorithm: int
    protocol: int
    n_channels: int
    message_bytes: int
    duration_us: float
    timing_source: int


class Answer(msgspec.Struct, frozen=True):
    """NCCL's choice for a question."""

    question: Question
    algorithm: Algorithm | None
    """None: tuner ABI v2 does not report it."""
    protocol: Protocol | None
    n_channels: int
    """Channels of the launched kernel; 0: unknown."""
    n_decisions: int
    """Records of a decision per rank: one, even if a release asks the tuner more often."""
    function_id: int
    """Number of the launched device function, which identifies the cell whatever a plugin says; 0: unknown."""
    count: int
    """Elements over all channels of the launched kernel (all_gather, broadcast: bytes per rank); 0: unknown."""
    cells: tuple[Cell, ...]
    """Cells of the cost table; empty: the release does not pass it to the tuner."""
    matched: bool = False
    """Whether NCCL took the setting of a plan's row."""
    ignored: bool = False
    """Whether a row applied, but NCCL does not offer its cell here."""
    n_nodes: int = 0
    """NCCL's number for the tuner, which counts a node more than once if its rings use network adapters; 0: unknown."""
    taken_bytes: int = 0
    """Memory of the node's first GPU that stays in use: an algorithm was connected for this call."""
    ran: tuple[Ran, ...] = ()
    """The kernel of each rank of the node, if kernels are observed and the release has a profiler."""


class NodeAnswer(msgspec.Struct, frozen=True):
    """The answer of node 0's process."""

    version: tuple[int, int, int]
    tuner_abi: int
    init_s: float
    """Time until all communicators were made."""
    answers: tuple[Answer, ...]
    search: Search | None = None
