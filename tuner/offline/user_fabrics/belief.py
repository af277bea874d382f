"""The belief of NCCL's own library about a cluster, for a fabric file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ....agent.nccl.cell_terms import Topology
from ....agent.nccl.libnccl import Libnccl
from ....agent.nccl.mock_cuda.machine import read_machine
from ....agent.nccl.twin.live_table import MODELLED_SINCE, Difference, differences, with_stated_cells
from ....agent.nccl.twin.protocol import Question
from ....agent.nccl.twin.search import believed
from ....agent.nccl.twin.twin import Cluster, ask_nccl
from ....store.errors import UserError
from ....store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, PlanRow, Protocol
from ..nccl_choices.choices import shareable

_COLLECTIVES: Final = (
    Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce, Collective.broadcast, Collective.reduce,
)  # fmt: skip
_SIZES: Final = tuple(1 << exponent for exponent in range(10, 31, 2))
_QUICKLY_CONNECTED: Final = Candidate(Algorithm.ring, Protocol.simple, 1)


class ReleaseBelief(NamedTuple):
    """A release's belief about one communicator."""

    topology: Topology
    release: str
    worst: Difference
    """The cell whose NCCL estimate the belief misses most, of five collectives from 1 KiB to 1 GiB."""


def ask(library: Path, cluster: Cluster) -> ReleaseBelief:
    """Let a libnccl.so.2 search the cluster's topology, and compare its cost tables with the resulting belief.

    Raises:
        UserError: the ranks do not fit the topology, a file is invalid, or the release is too old.
        PluginError: the library failed.
    """
    if (nccl := Libnccl(library)).version < MODELLED_SINCE:
        oldest = ".".join(map(str, MODELLED_SINCE))
        raise UserError(
            f"{library} is NCCL {nccl.version_text}, whose cost tables are older", f"take {oldest} or newer"
        )
    questions = [Question(each, shareable(size, cluster.n_ranks)) for each in _COLLECTIVES for size in _SIZES]
    answer = ask_nccl(library, cluster, questions, _rows(cluster), search=True)
    assert answer.search is not None
    if any(each.n_nodes not in (0, cluster.n_nodes) for each in answer.answers):
        raise UserError(
            f"NCCL leads its rings over {cluster.topology} through the network adapters, and takes a node for several",
            "no fabric can be made of such a machine; without <net> in the file, rings stay within the node",
        )
    machine = read_machine(cluster.topology)
    model = believed(answer.search, machine, cluster.n_ranks, cluster.n_nodes, answer.version)
    model = with_stated_cells(answer.answers, model)
    worst = max(differences(answer.answers, model), key=lambda each: each.relative_error)
    return ReleaseBelief(model, nccl.version_text, worst)


def _rows(cluster: Cluster) -> Sequence[PlanRow]:
    """A plan with which NCCL connects only rings, as the cost tables are the same."""
    place = CommunicatorClass(cluster.n_ranks, cluster.n_nodes)
    return [PlanRow(place, each, Phase.other, 1, 1 << 40, _QUICKLY_CONNECTED) for each in _COLLECTIVES]
