"""What a twin's processes are asked and answer: JSON lines on standard input and output."""

from __future__ import annotations

from typing import Final

import msgspec

from ....store.records import Algorithm, Collective, Phase, PlanRow, Protocol
from .search import Search

FAILED: Final = 1
"""Exit code of a process after an error that it told on standard error."""
USER_ERROR: Final = 2
"""Exit code where that was something that the user can mend."""


class Question(msgspec.Struct, frozen=True):
    """One collective call."""

    collective: Collective
    message_bytes: int
    """NCCL's nBytes: the total over ranks for all_gather and reduce_scatter."""
    average: bool = False
    phase: Phase = Phase.other


def duration_us(place: int) -> float:
    """How long the kernel of the question at `place` takes where they are observed: different for each."""
    return 20.0 + 0.25 * place


class NodeRequest(msgspec.Struct, frozen=True):
    """What one node's process is to do."""

    library: str
    topology: str
    n_nodes: int
    ranks_per_node: int
    node: int
    questions: tuple[Question, ...]
    rows: tuple[PlanRow, ...] = ()
    """A plan in force while the questions are asked."""
    observe: bool = False
    """Whether kernels end, each after `duration_us` of its question, and NCCL's profiler tells of them."""
    search: bool = False
    """Whether to tell what NCCL's topology search found."""
    unique_id: str = ""
    """Hexadecimal; empty for node 0, which makes it."""


class Cell(msgspec.Struct, frozen=True):
    """A cell of NCCL's cost table."""

    algorithm: Algorithm
    protocol: Protocol
    cost_us: float


class Ran(msgspec.Struct, frozen=True):
    """What NCCL's profiler said of a kernel."""

    algorithm: int
    protocol: int
    n_channels: int
    message_bytes: int
    duration_us: float
    timing_source: int


class Answer(msgspec.Struct, frozen=True):
    """What NCCL made of a question."""

    question: Question
    algorithm: Algorithm | None
    """None: tuner interface v2 does not show it."""
    protocol: Protocol | None
    n_channels: int
    """Channels of the launched kernel; 0 = not known."""
    n_decisions: int
    """How often a rank settled what runs: once, also where a release asks the tuner more often."""
    function_id: int
    """Number of the launched device function, 0 = not known: it tells cells apart, whatever a plugin says."""
    count: int
    """Elements over all channels of the launched kernel (all_gather, broadcast: bytes per rank); 0 = not known."""
    cells: tuple[Cell, ...]
    """What its table offered; empty: the release does not show it."""
    matched: bool = False
    """A row of the plan was carried out."""
    ignored: bool = False
    """A row applied, but NCCL does not offer its cell here."""
    n_nodes: int = 0
    """As NCCL counts them for the tuner: a node whose rings go through network adapters is several. 0 = not known."""
    taken_bytes: int = 0
    """Memory of the node's first GPU that was taken for good: what it cost to connect an algorithm at its first use."""
    ran: tuple[Ran, ...] = ()
    """One for each rank of the node, where kernels are observed and the release has a profiler."""


class NodeAnswer(msgspec.Struct, frozen=True):
    """What node 0's process found."""

    version: tuple[int, int, int]
    tuner_abi: int
    init_s: float
    """Until all communicators were made."""
    answers: tuple[Answer, ...]
    search: Search | None = None
