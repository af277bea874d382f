"""`zerotune predict`: the settings that a new job would run, by node count and size, with reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ...agent.nccl import fabric as fabrics
from ...agent.nccl.fabric_model import Fabric
from ...store.counted import counted, faster
from ...store.errors import FabricError, UserError
from ...store.records import (
    BASELINE,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    size_class,
    size_class_floor,
)
from ...store.sqlite.database import Store
from ..learning.knowledge import Knowledge
from ..modeling.cost_prior import CostPrior
from ..modeling.medians import MeasuredSetting, Medians, medians
from ..modeling.statistics import statistics
from .jobs.finding import job_of

_NODES: Final = (1, 2, 4, 8)
_SIZES: Final = tuple(1 << place for place in range(10, 31))


class Ground(str, Enum):
    """The reason for a setting."""

    proven = "proven"
    """Earlier jobs on this fabric measured it to be faster than the baseline."""
    leads = "leads"
    """Earlier jobs expect it to be faster without proof: it runs in most steps."""
    nccl = "nccl"
    """Nothing known is faster: NCCL's own choice."""


class TableEntry(msgspec.Struct, frozen=True):
    """The setting of one call from the first step on; later trials are not predicted."""

    collective: str
    phase: str
    n_nodes: int
    n_ranks: int
    message_bytes: int
    setting: str
    """With ground `nccl`, the choice of NCCL's cost model; `baseline` if NCCL's topology is unknown."""
    ground: Ground
    reason: str
    expected_us: float | None
    """Expected time of the setting; None: unknown."""
    is_measured: bool
    """Whether this fabric's jobs measured the setting at this key; else `expected_us` is a prediction."""
    nccl_us: float | None
    """Expected time of NCCL's own choice; None: unknown."""
    cheapest: str
    """The candidate with the least expected time, a subject for exploring; `baseline` if that is NCCL's."""
    cheapest_us: float | None


class ChoiceTable(msgspec.Struct, frozen=True):
    """The entries of one fabric, and the assumptions."""

    fabric_id: str
    emulated: str
    """Name of the fabric file; empty: the machine is real."""
    ranks_per_node: int
    n_keys: int
    """Keys that earlier jobs on the fabric measured."""
    entries: tuple[TableEntry, ...]
    notes: tuple[str, ...]


def choice_table(
    store_path: Path,
    fabric: str | None,
    nodes: Sequence[int] | None,
    sizes_bytes: Sequence[int] | None,
    collectives: Sequence[Collective],
    ranks_per_node: int | None = None,
) -> ChoiceTable:
    """The settings that would be chosen on a fabric: one entry per collective, measured phase, node count and size.

    A single rank has none.

    Args:
        store_path: may be missing if `fabric` is given.
        fabric: name or path of a fabric file; None: the fabric of the newest job.
        nodes: node counts; None: 1, 2, 4 and 8, or those of a fabric file that describes no network.
        sizes_bytes: NCCL's nBytes; None: doubling from 1 KiB to 1 GiB, and the smallest size of each other measured
            size class.
        ranks_per_node: None: that of the jobs, or else of the fabric file.

    Raises:
        UserError: there is no job, the fabric has no network, the ranks of a node do not fit or are unknown.
    """
    described = None if fabric is None else fabrics.load(fabric)
    knowledge, lines = Knowledge(), list[CandidateStatistics]()
    facts = {} if described is None else described.describe()
    fabric_id = "" if described is None else described.fabric_id
    if described is None or store_path.exists():
        with Store.open(store_path, read_only=True) as store:
            if described is None:
                fabric_id = job_of(store, None).fabric_id
                facts = store.fabrics().get(fabric_id, {})
                described = _same_file(str(facts.get("emulated", "")), fabric_id)
            lines = statistics(store, fabric_id)
            knowledge = Knowledge.from_store(store, fabric_id)
    notes = []
    if nodes is None:
        is_alone = described is not None and described.belief.many_nodes is None
        nodes = [n for n in _NODES if described is None or not is_alone or n <= described.max_nodes]
    if described is not None and max(nodes) > described.max_nodes:
        if described.belief.many_nodes is None:
            raise UserError(f"fabric {described.name} describes no network", "use --nodes 1, or name another --fabric")
        known = counted(described.max_nodes, "node")
        notes.append(f"{described.name} describes {known}: the others are taken to be like them.")
        described = described.with_nodes(max(nodes))
    if described is None:
        notes.append("NCCL's topology is not known here: its own choice cannot be named, and costs are a rough line.")
    if not lines:
        notes.append("No job on this fabric is recorded: costs are NCCL's own estimates.")
    per_node = ranks_per_node or _ranks_per_node(lines) or (described.ranks_per_node if described else 0)
    if not per_node:
        raise UserError("nobody says how many ranks a node has", "give --ranks-per-node")
    if described is not None and per_node > described.ranks_per_node:
        raise UserError(
            f"--ranks-per-node {per_node}: a node of {described.name} has {described.ranks_per_node} ranks",
            "ask for no more",
        )
    if not (nodes := [n_nodes for n_nodes in nodes if n_nodes * per_node > 1]):
        raise UserError("1 rank on 1 node sends nothing", "give --nodes 2 or more, or --ranks-per-node")
    costs = CostPrior(facts, described)
    measured = medians(lines)
    entries = []
    for collective in collectives:
        phases = sorted({line.key.phase for line in lines if line.key.collective is collective}) or [Phase.other]
        for phase in phases:
            sizes = _usual_sizes(measured, collective, phase) if sizes_bytes is None else sizes_bytes
            for n_nodes in nodes:
                place = CommunicatorClass(n_nodes * per_node, n_nodes)
                for size in sizes:
                    key = DecisionKey(place, collective, phase, size_class(size))
                    entries.append(_entry(key, size, knowledge, costs, measured))
    emulated = str(facts.get("emulated", ""))
    return ChoiceTable(fabric_id, emulated, per_node, knowledge.n_keys, tuple(entries), tuple(notes))


def _usual_sizes(measured: Medians, collective: Collective, phase: Phase) -> list[int]:
    of_classes = {size_class(size): size for size in _SIZES}
    for key in measured:
        if key.collective is collective and key.phase is phase:
            of_classes.setdefault(key.size_class, size_class_floor(key.size_class))
    return sorted(of_classes.values())


def _entry(
    key: DecisionKey,
    message_bytes: int,
    knowledge: Knowledge,
    costs: CostPrior,
    measured: Medians,
) -> TableEntry:
    candidates = list(costs.candidates(key.communicator, key.collective))
    known = knowledge.decided(key)
    lead = knowledge.promising(key) if known is None else None
    if known is not None:
        chosen, reason, ground = *known, Ground.proven
    elif lead is not None:
        chosen, reason, ground = lead.candidate, lead.reason, Ground.leads
    else:
        chosen, reason, ground = BASELINE, _why_nccl(measured.get(key, {})), Ground.nccl
    candidates += [chosen] if chosen not in candidates else []
    mean, _ = knowledge.prior(key, float(message_bytes), candidates, costs)
    own = costs.default(key.communicator, key.collective, message_bytes)
    times_us = {one: math.exp(log_us) for one, log_us in zip(candidates, mean.tolist(), strict=True) if log_us < np.inf}
    cheapest = min(times_us, key=lambda one: (times_us[one], str(one)), default=BASELINE)
    if times_us.get(cheapest, 0.0) >= times_us.get(BASELINE, math.inf):
        cheapest = BASELINE
    return TableEntry(
        collective=key.collective.name,
        phase=key.phase.name,
        n_nodes=key.communicator.n_nodes,
        n_ranks=key.communicator.n_ranks,
        message_bytes=message_bytes,
        setting=str(own or BASELINE) if chosen.is_baseline else str(chosen),
        ground=ground,
        reason=reason,
        expected_us=times_us.get(chosen),
        is_measured=chosen in measured.get(key, {}),
        nccl_us=times_us.get(BASELINE),
        cheapest=str(cheapest),
        cheapest_us=times_us.get(cheapest),
    )


def _why_nccl(measured: Mapping[Candidate, MeasuredSetting]) -> str:
    n_settings = sum(not (one.is_baseline or one.lacks_protocol) for one in measured)
    why = "no other setting was measured here"
    if n_settings:
        why = f"{counted(n_settings, 'other setting')} measured, none shown to be faster"
    own, of_algorithms = measured.get(BASELINE), [one for one in measured if one.lacks_protocol]
    if own is None or not of_algorithms:
        return why
    best = min(of_algorithms, key=lambda one: (measured[one].median_us, str(one)))
    change = 100 * (measured[best].median_us / own.median_us - 1)
    return f"{why}; {best} measured {faster(change)}, under a protocol that nobody recorded: it cannot be asked for"


def _same_file(name: str, fabric_id: str) -> Fabric | None:
    """The fabric file that the jobs ran on; None: they had none, or it has changed since."""
    if not name:
        return None
    try:
        found = fabrics.load(name)
    except FabricError:
        return None
    return found if found.fabric_id == fabric_id else None


def _ranks_per_node(lines: Sequence[CandidateStatistics]) -> int:
    """Ranks per node of the largest measured communicator; 0: none was measured."""
    return max((one.key.communicator.n_ranks // one.key.communicator.n_nodes for one in lines), default=0)
