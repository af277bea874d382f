"""Choices of one NCCL release, or of two, by collective and size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ....agent.nccl.twin.protocol import Answer, Question
from ....agent.nccl.twin.twin import Cluster, ask_nccl
from ....store.errors import UserError
from ....store.records import Collective


class Offer(msgspec.Struct, frozen=True):
    """An algorithm and protocol that NCCL could take, with its own estimate."""

    algorithm: str
    protocol: str
    estimate_us: float


class Choice(msgspec.Struct, frozen=True):
    """NCCL's choice for one call."""

    collective: str
    message_bytes: int
    algorithm: str | None
    """None: the release does not show its choice (2.21)."""
    protocol: str | None
    n_channels: int | None
    estimate_us: float | None
    offers: tuple[Offer, ...]
    """Every algorithm and protocol that NCCL has here, the cheapest first."""

    def setting(self) -> str:
        """The setting in words."""
        if self.algorithm is None:
            return "not shown"
        channels = f"/{self.n_channels}ch" if self.n_channels else ""
        return f"{self.algorithm}/{self.protocol}{channels}"


class Choices(msgspec.Struct, frozen=True):
    """One release's choices on one cluster."""

    nccl: str
    library: str
    topology: str
    n_nodes: int
    ranks_per_node: int
    tuner_abi: int
    max_channels: int | None
    """The largest number of channels of any call."""
    choices: tuple[Choice, ...]


class ChoiceChange(msgspec.Struct, frozen=True):
    """A call for which two releases choose differently."""

    before: Choice
    after: Choice


def ask(library: Path, cluster: Cluster, collectives: Sequence[Collective], sizes_bytes: Sequence[int]) -> Choices:
    """NCCL's own choices, one per collective and size, asked of a libnccl.so.2.

    Args:
        sizes_bytes: NCCL's nBytes; rounded up to equal aligned shares of the ranks.

    Raises:
        UserError: the ranks do not fit the topology, or a file is invalid.
        PluginError: the library failed.
    """
    sizes = dict.fromkeys(shareable(size, cluster.n_ranks) for size in sizes_bytes)
    questions = [Question(collective, size) for collective in collectives for size in sizes]
    found = ask_nccl(library, cluster, questions)
    choices = tuple(_choice(answer) for answer in found.answers)
    return Choices(
        nccl=".".join(map(str, found.version)),
        library=str(library),
        topology=cluster.topology.stem,
        n_nodes=cluster.n_nodes,
        ranks_per_node=cluster.ranks_per_node,
        tuner_abi=found.tuner_abi,
        max_channels=max((choice.n_channels or 0 for choice in choices), default=0) or None,
        choices=choices,
    )


def shareable(message_bytes: int, n_ranks: int) -> int:
    """The smallest size from `message_bytes` on that gives equal shares aligned to 16 bytes."""
    unit = 16 * n_ranks
    return -(-message_bytes // unit) * unit


def _choice(answer: Answer) -> Choice:
    offers = sorted(
        (Offer(cell.algorithm.name, cell.protocol.name, cell.cost_us) for cell in answer.cells),
        key=lambda offer: offer.estimate_us,
    )
    algorithm = None if answer.algorithm is None else answer.algorithm.name
    protocol = None if answer.protocol is None else answer.protocol.name
    estimates = (offer.estimate_us for offer in offers if (offer.algorithm, offer.protocol) == (algorithm, protocol))
    return Choice(
        collective=answer.question.collective.name,
        message_bytes=answer.question.message_bytes,
        algorithm=algorithm,
        protocol=protocol,
        n_channels=answer.n_channels or None,
        estimate_us=next(estimates, None),
        offers=tuple(offers),
    )


def changes(before: Choices, after: Choices) -> Iterator[ChoiceChange]:
    """Calls for which two releases choose differently; UserError if one of them does not show its choices."""
    for asked in (before, after):
        if all(one.algorithm is None for one in asked.choices):
            raise UserError(f"NCCL {asked.nccl} does not show what it chooses", "compare 2.22 or newer")
    for one, other in zip(before.choices, after.choices, strict=True):
        if one.setting() != other.setting():
            yield ChoiceChange(one, other)
