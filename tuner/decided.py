"""Results of a job's decisions: the last one on every key, the proven ones, the ones that ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..store.records import Candidate, Decision, DecisionKey, DecisionKind


def since_takeover(decisions: Sequence[Decision]) -> Sequence[Decision]:
    """The decisions of the daemon that decided last, of a job's decisions in the order of recording.

    If no daemon took over, these are all decisions. Times are not compared, since the clock may have been put back
    between two daemons. Decisions of one moment have one time.
    """
    begin = max((at for at, one in enumerate(decisions) if one.kind == DecisionKind.takeover), default=0)
    while begin and decisions[begin - 1].decided_at_s == decisions[begin].decided_at_s:
        begin -= 1
    return decisions[begin:]


def settled_decisions(decisions: Iterable[Decision]) -> dict[DecisionKey, Decision]:
    """The last decision on every key, without beginnings of trials and decisions on the whole job."""
    return {one.key: one for one in decisions if _is_word(one)}


def proven_decisions(decisions: Iterable[Decision]) -> dict[DecisionKey, Decision]:
    """By key the decision that put the setting in force.

    If a candidate only leads, it is the decision on the setting that the candidate is compared with.
    """
    found: dict[DecisionKey, Decision] = {}
    leads: dict[DecisionKey, Candidate] = {}
    for one in filter(_is_word, decisions):
        is_proven = one.kind in (DecisionKind.promote, DecisionKind.prior)
        if one.kind == DecisionKind.provisional:
            leads[one.key] = one.candidate
        elif is_proven or one.candidate != leads.get(one.key):
            leads.pop(one.key, None)
            if is_proven or one.key not in found or found[one.key].candidate != one.candidate:
                found[one.key] = one
    return found


def decisions_that_ran(decisions: Iterable[Decision], highest_epoch: int | None) -> list[Decision]:
    """The decisions whose setting ran in some step.

    `highest_epoch` is the highest epoch of steps; None: unknown. A decision has the epoch of the plan to come. Its
    setting may run already, on trial by an earlier decision's plan or in alternate windows. Then no plan has to come.
    """
    asked_for: dict[tuple[DecisionKey, Candidate], int] = {}
    found = []
    for one in decisions:
        first_epoch = asked_for.setdefault((one.key, one.candidate), one.epoch)
        ran = one.candidate.is_baseline or highest_epoch is None or first_epoch <= highest_epoch
        if ran or (highest_epoch and one.n_measurements):
            found.append(one)
    return found


def n_tried(decisions: Iterable[Decision], highest_epoch: int | None) -> int:
    """Number of decisions that began a trial which ran in some step; `highest_epoch` as in `decisions_that_ran`."""
    return sum(one.kind == DecisionKind.explore for one in decisions_that_ran(decisions, highest_epoch))


def _is_word(decision: Decision) -> bool:
    return decision.kind != DecisionKind.explore and not decision.is_of_job
