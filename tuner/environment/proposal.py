"""Proposes the variables of a training's next start, for `zerotune launch --tune-environment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...agent.machine.nccl_variables import in_effect
from ...store.sqlite.database import Store
from .candidates import Candidate, candidates_for
from .history import History, history, training_id
from .trials import Outcome, kept, next_job


class Proposal(NamedTuple):
    """The variables of one start, and the reason."""

    training: str
    variables: str
    """`NAME=VALUE` separated by spaces; empty: the usual environment."""
    why: str


def propose(
    store_file: Path,
    command: Sequence[str],
    name: str | None,
    own: Sequence[Candidate] | None,
    environment: Mapping[str, str],
) -> Proposal:
    """The variables of this start; a training's first start runs with the usual environment.

    Starts of a job share its name, or else its command. Variables of the launch's `environment` do not change. The
    user's `own` list takes the place of the curated one.
    """
    training = training_id(command, name)
    if not store_file.exists():
        return Proposal(training, "", "the first start, with which others are compared")
    with Store.open(store_file, read_only=True) as store:
        known = history(store, training)
    taken = in_effect(environment)
    if known.jobs and known.jobs[-1].outcome is Outcome.unknown:
        return Proposal(training, kept(known.jobs), "how the last start ends, or ended, is not known")
    choice = next_job(known.jobs, candidates(known, taken, own), elsewhere=known.elsewhere)
    wanted = [one for one in choice.change.split() if one.partition("=")[0] not in taken]
    yours = [f"{one.variable}={taken[one.variable]}" for one in own or () if one.variable in taken]
    why = choice.why + (f"; {', '.join(yours)} is set by you, and stays" if yours else "")
    return Proposal(training, " ".join(wanted), why)


def candidates(known: History, taken: Mapping[str, str], own: Sequence[Candidate] | None = None) -> list[Candidate]:
    """The changes that may be tried on the history's machine, the most promising first.

    Variables in `taken` are set already and do not change. The user's `own` list takes the place of the curated one.
    """
    if own is not None:
        return [one for one in own if one.variable not in taken]
    machine = {**known.hardware, "NCCL_NET": taken.get("NCCL_NET", "")}  # it names the network plugin
    return candidates_for(machine, nccl_of(known.hardware), known.is_multi_node, taken)


def nccl_of(hardware: Mapping[str, str | int | float | bool]) -> int:
    """NCCL's version in a machine's description, as NCCL encodes it; 0: unknown."""
    version = hardware.get("nccl_version", 0)
    if isinstance(version, str):  # an emulated machine writes text
        parts = [int(part) for part in version.split(".")[:3] if part.isdecimal()]
        major, minor, patch = (*parts, 0, 0, 0)[:3]
        return major * 10000 + minor * 100 + patch
    return int(version)
