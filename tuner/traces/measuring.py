"""Converts a trace's records to measurements for the store; the user's options fill in missing facts.

Options do not override what a file states for each record; unused options get a note. Numbers of ranks and nodes are
mostly counted, so options override them, unless the file has several numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...store.errors import UserError
from ...store.records import Candidate, Collective, Source
from ...store.sqlite.rows.measurements import MEASUREMENT, candidate_of
from ...store.sqlite.rows.runnable import can_run, runnable, runnable_cells, with_only_protocols
from .left_out import LeftOut
from .records import FLAG_DEFAULT, FLAG_FORCED, UNKNOWN_U1, UNKNOWN_U4, Block, Summary

_SAME_FIELDS: Final = (
    "n_ranks", "n_nodes", "message_bytes", "duration_us", "epoch", "memory_pressure", "collective", "phase",
    "algorithm", "protocol", "n_channels", "timing_source", "chunk_bytes",
)  # fmt: skip


STORED_CHANNELS: Final = 64
"""Most channels of a measurement; RCCL has more."""
_CHOOSABLE: Final = [int(one) for one in Collective if runnable_cells(one, n_nodes=0)]


@dataclass(frozen=True)
class UserFacts:
    """Facts from the user about measurements, if their file lacks them."""

    setting: Candidate | None = None
    """The setting in NCCL_ALGO and NCCL_PROTO."""
    is_default: bool = False
    """Whether NCCL chose all settings."""
    n_nodes: int | None = None
    n_ranks: int | None = None


@dataclass(frozen=True)
class Portion:
    """Measurements of one job on one fabric."""

    rows: Block
    """MEASUREMENT of zerotune.store.sqlite.rows.measurements, shape (n,)."""
    job_id: str | None = None
    """Id of the job; None if the file does not name it."""
    fabric_id: str | None = None
    """Id of the fabric; None if the file does not name it."""
    fabric: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    n_ranks: int = 0
    """Ranks of the job; 0: unknown."""
    path: Path | None = None
    """The file with these rows; None if the files of ranks are one trace."""


def measured(block: Block, user_facts: UserFacts, summary: Summary, *, is_one_shape: bool = False) -> Block:
    """The timed records of a block, OBSERVATION of shape (n,), as MEASUREMENT; others are counted by reason.

    With `is_one_shape`, all communicators have one size, and the user's ranks and nodes take precedence. Raises
    UserError if NCCL cannot run the user's setting for these records, or they cannot be on that number of nodes.
    """
    rows = np.zeros(len(block), MEASUREMENT)
    for name in _SAME_FIELDS:
        rows[name] = block[name]
    rows["step"] = np.where(block["step"] == UNKNOWN_U4, 0, block["step"])
    rows["is_default"] = (block["flags"] & FLAG_DEFAULT) != 0
    rows["source"] = Source.imported
    is_forced = (block["flags"] & FLAG_FORCED) != 0
    timed = rows["duration_us"] > 0
    summary.skip(LeftOut.no_duration, int((~timed).sum()))
    rows, is_forced = rows[timed], is_forced[timed]
    uncounted = rows["n_channels"] > STORED_CHANNELS
    if uncounted.any():
        rows["n_channels"][uncounted] = 0
        summary.note(
            f"{uncounted.sum():,} records ran on more than {STORED_CHANNELS} channels, NCCL's limit: they are recorded"
            " without their number"
        )
    if is_one_shape:
        _overrule(rows, user_facts, summary)
    is_placed = _place(rows, user_facts, summary, fewest_ranks=2)
    return with_setting(rows[is_placed], user_facts, summary, is_forced[is_placed])


def with_setting(
    rows: Block, user_facts: UserFacts, summary: Summary, is_forced: NDArray[np.bool_] | None = None
) -> Block:
    """The rows, MEASUREMENT of shape (n,), whose setting the file or the user names; the others are counted.

    Rows are changed in place. `is_forced`, shape (n,), marks rows for which the file says that NCCL did not choose the
    setting. Raises UserError if NCCL cannot run the user's setting for these rows.
    """
    is_forced = np.zeros(len(rows), bool) if is_forced is None else is_forced
    silent = (rows["algorithm"] == UNKNOWN_U1) & (rows["is_default"] == 0)
    if user_facts.setting is not None:
        chosen = np.isin(rows["collective"], _CHOOSABLE)
        summary.skip(LeftOut.nothing_to_choose, int((silent & ~chosen).sum()))
        rows, silent = rows[chosen | ~silent], silent[chosen | ~silent]
        _fill_in(rows, silent, user_facts.setting, summary)
        silent[:] = False
    elif user_facts.is_default:
        if is_forced.any():
            summary.note("the file says that somebody asked for some of its settings: --default was not used for them")
        rows["is_default"][~is_forced] = 1
        silent &= is_forced
    summary.skip(LeftOut.setting_unknown, int(silent.sum()))
    kept: Block = rows[~silent]
    if (with_only_protocols(kept) & (kept["is_default"] == 0)).any():
        summary.note(WITHOUT_PROTOCOL)
    return kept


WITHOUT_PROTOCOL: Final = (
    "of some measurements only the algorithm is known: they are shown and compared as a whole, and no setting is chosen"
    " because of them; where NCCL_PROTO was set, say so with --setting ALGORITHM/PROTOCOL"
)


def without_impossible(rows: Block, summary: Summary) -> Block:
    """The rows (MEASUREMENT or OBSERVATION, shape (n,)) without a setting, or with one that NCCL can run.

    Rows with an impossible setting are mistakes, and could be the fastest ones. Zerotune's own measurements are kept,
    as they are known to have run.
    """
    possible = runnable(rows)
    if "source" in (rows.dtype.names or ()):
        possible |= rows["source"] != Source.imported
    if possible.all():
        return rows  # a copy would take longer than everything else here
    one = rows[~possible][0]
    setting, nodes = candidate_of(one["algorithm"], one["protocol"], 0), int(one["n_nodes"])
    where = f" on {_nodes(nodes)}" if nodes else ""
    example = f"{setting} for {Collective(one['collective']).name}{where}"
    summary.skip(LeftOut.cannot_run, int((~possible).sum()), example)
    kept: Block = rows[possible]
    return kept


def placed(rows: Block, user_facts: UserFacts, summary: Summary) -> Block:
    """The rows whose numbers of ranks and nodes are known, from the file or from the user; the others are counted.

    Raises UserError if the rows cannot be on that number of nodes.
    """
    kept: Block = rows[_place(rows, user_facts, summary)]
    return kept


def _overrule(rows: Block, user_facts: UserFacts, summary: Summary) -> None:
    """Replace a file's ranks and nodes by the user's, unless the file states several."""
    for name, option, given in (
        ("n_ranks", "--ranks", user_facts.n_ranks),
        ("n_nodes", "--nodes", user_facts.n_nodes),
    ):
        stated = np.unique(rows[name][rows[name] > 0])
        if given is not None and len(stated) == 1 and stated[0] != given:
            what = f"{stated[0]} {name.removeprefix('n_')}"
            summary.note(f"the file says or implies {what}, {option} {given}: {option} was used")
            rows[name] = given


def _place(rows: Block, user_facts: UserFacts, summary: Summary, fewest_ranks: int = 1) -> NDArray[np.bool_]:
    """Fill in the nodes; returns which rows, shape (n,), then have ranks and nodes."""
    if user_facts.n_ranks is not None:
        if ((rows["n_ranks"] > 0) & (rows["n_ranks"] != user_facts.n_ranks)).any():
            summary.note(f"the file tells its numbers of ranks: --ranks {user_facts.n_ranks} was not used for them")
        rows["n_ranks"][rows["n_ranks"] == 0] = user_facts.n_ranks
    if user_facts.n_nodes is not None:
        others = rows["n_nodes"][(rows["n_nodes"] > 0) & (rows["n_nodes"] != user_facts.n_nodes)]
        if len(others):
            summary.note(f"the file tells its number of nodes: --nodes {user_facts.n_nodes} was not used for it")
        unstated = (rows["n_nodes"] == 0) & (rows["n_ranks"] > 1)
        fewest = int(rows["n_ranks"][unstated if unstated.any() else rows["n_ranks"] > 1].min(initial=UNKNOWN_U4))
        if fewest < user_facts.n_nodes:
            raise UserError(f"{fewest} ranks cannot be on {user_facts.n_nodes} nodes", "mend --nodes")
        rows["n_nodes"][unstated] = user_facts.n_nodes
    has_ranks = rows["n_ranks"] >= fewest_ranks
    known = has_ranks & (rows["n_nodes"] > 0)
    possible: NDArray[np.bool_] = rows["n_nodes"] <= rows["n_ranks"]
    summary.skip(LeftOut.ranks_unknown, int((~has_ranks).sum()))
    summary.skip(LeftOut.nodes_unknown, int((has_ranks & ~known).sum()))
    summary.skip(LeftOut.too_many_nodes, int((known & ~possible).sum()))
    return known & possible


def _fill_in(rows: Block, silent: NDArray[np.bool_], setting: Candidate, summary: Summary) -> None:
    """Write `setting` into rows without one, after a check that NCCL can run it there."""
    if setting.algorithm is None:
        return
    protocol = UNKNOWN_U1 if setting.protocol is None else setting.protocol
    lacks_protocol = (rows["algorithm"] == setting.algorithm) & (rows["protocol"] == UNKNOWN_U1)
    silent = silent | (lacks_protocol & (rows["is_default"] == 0))
    for place in np.unique(rows[silent][["collective", "n_nodes"]]).tolist():
        _check_legal(Collective(place[0]), place[1], setting)
    differs = (rows["algorithm"] != setting.algorithm) | ((rows["protocol"] != protocol) & (protocol != UNKNOWN_U1))
    if (~silent & differs).any():
        summary.note("the file says of some records what ran: --setting was not used for them")
    rows["algorithm"][silent] = setting.algorithm
    rows["protocol"][silent] = protocol
    rows["n_channels"][silent & (rows["n_channels"] == 0)] = setting.n_channels


def _check_legal(collective: Collective, n_nodes: int, setting: Candidate) -> None:
    """Refuse a setting that no NCCL release offers on any hardware."""
    if can_run(collective, setting.algorithm, setting.protocol, n_nodes):
        return
    cells = runnable_cells(collective, n_nodes)
    offered = ", ".join(str(Candidate(*cell)) for cell in cells) or "nothing to choose from"
    words = f"{setting} cannot have run: for {collective.name} on {_nodes(n_nodes)} NCCL has {offered}"
    raise UserError(words, "mend --setting")


def _nodes(n_nodes: int) -> str:
    return "1 node" if n_nodes == 1 else f"{n_nodes:,} nodes"
