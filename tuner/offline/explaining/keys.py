"""Explanations of keys, from each key's decisions and measurements."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from ....store.records import BASELINE, Candidate, Decision, DecisionKey, DecisionKind, size_class_range
from ...decided import decisions_that_ran
from ...learning.policy.overrides import Override
from ...modeling.equal_channels import as_offered
from ...modeling.medians import MeasuredSetting, Medians
from ..comparison import alternatives_of
from .values import Explanation


def by_keys(decisions: Sequence[Decision]) -> dict[DecisionKey, list[Decision]]:
    """Decisions by key, in order; those that concern the whole job are left out."""
    found: dict[DecisionKey, list[Decision]] = {}
    for decision in decisions:
        if not decision.is_of_job:
            found.setdefault(decision.key, []).append(decision)
    return found


def news_of(decisions: Sequence[Decision]) -> list[str]:
    """Decisions that concern the whole job, as text, in order."""
    of_job = (one for one in decisions if one.is_of_job and not one.is_control)
    return [f"{when(decision)}: {decision.reason}" for decision in of_job]


Guesses = tuple[str, list[dict[str, Any]]]
"""The model, and its expectations for every candidate of a key."""


def explained(
    decisions: Mapping[DecisionKey, Sequence[Decision]],
    here: Medians,
    everywhere: Medians,
    guesses: Mapping[DecisionKey, Guesses],
    job_history: list[str],
    current: Collection[Decision],
    highest_epoch: int | None = None,
) -> list[Explanation]:
    """Explanations by key, in the order of keys; keys without decisions are explained by `guesses`.

    The decisions of a key are in the order they were taken.

    Args:
        current: decisions of the daemon that decided last; all others are only history.
        highest_epoch: decisions of plans with later epochs are not in force; None: unknown.
    """
    keys = sorted({*decisions, *guesses})
    return [
        _explanation(
            key,
            decisions.get(key, ()),
            here.get(key, {}),
            everywhere.get(key, {}),
            guesses.get(key),
            job_history,
            current,
            highest_epoch,
        )
        for key in keys
    ]


def deciding(settled: Sequence[Decision]) -> Decision | None:
    """The decision that put the present setting in force; `decisions` are a key's without beginnings of trials."""
    if not settled:
        return None
    since = list(takewhile(lambda one: one.candidate == settled[-1].candidate, reversed(settled)))[::-1]
    chosen = [one for one in since if one.kind in (DecisionKind.promote, DecisionKind.prior, DecisionKind.provisional)]
    if chosen:
        return chosen[-1]
    return since[0] if since[0].kind == DecisionKind.rollback else since[-1]


def when(decision: Decision) -> str:
    """The time, the step and the epoch of a decision."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.decided_at_s))
    step = "" if decision.step is None else f", step {decision.step}"
    return f"{clock}{step}, epoch {decision.epoch}"


def in_one_line(decision: Decision) -> str:
    """A decision as one line of its key's history."""
    return f"{when(decision)}: {decision.kind} {decision.candidate}: {decision.reason}"


def _explanation(
    key: DecisionKey,
    decisions: Sequence[Decision],
    here: Mapping[Candidate, MeasuredSetting],
    everywhere: Mapping[Candidate, MeasuredSetting],
    guesses: Guesses | None,
    job_history: list[str],
    current: Collection[Decision],
    highest_epoch: int | None,
) -> Explanation:
    settled = [one for one in decisions if one.kind != DecisionKind.explore and one in current]
    ran = decisions_that_ran(decisions, highest_epoch)
    in_force = [one for one in ran if one.kind != DecisionKind.explore and one in current]
    low, high = size_class_range(key.size_class)
    last = decisions[-1] if decisions else None
    model_id, alternatives = guesses or ("", [])
    if last is not None:  # whatever its kind, it saw the most evidence
        model_id, alternatives = last.model_id, alternatives_of(last)
    decision = deciding(settled)
    setting = str(in_force[-1].candidate if in_force else BASELINE)
    decided = str(settled[-1].candidate if settled else BASELINE)
    is_on_trial = last is not None and last.kind == DecisionKind.explore and last in current
    is_guess = bool(alternatives) and all(one.get("is_guess", False) for one in alternatives)
    offered = {str(one["candidate"]) for one in alternatives}
    here, everywhere = (as_offered(known, offered, key) for known in (here, everywhere))
    alternatives = [*alternatives, *_unweighed(alternatives, here, everywhere)]
    _add_medians(alternatives, here, everywhere)
    _date_notes(alternatives, decisions, decided)
    return Explanation(
        key=key,
        collective=key.collective.name,
        phase=key.phase.name,
        min_bytes=low,
        max_bytes=high,
        decision=None if decision is None else msgspec.structs.replace(decision, alternatives="[]"),
        alternatives=alternatives,
        is_guess=is_guess,
        decided_at_s=None if last is None else last.decided_at_s,
        n_explored=len({decision.candidate for decision in ran if decision.kind == DecisionKind.explore}),
        spent_us=sum(float(one.get("spent_us", 0.0)) for one in alternatives),
        history=list(map(in_one_line, decisions)),
        setting=setting,
        not_adopted=decided if decided != setting else "",
        on_trial=str(last.candidate) if last is not None and is_on_trial else "",
        is_trial_to_come=is_on_trial and last not in ran,
        model_id=model_id,
        job_history=job_history,
        runs_as=_runs_as(None if decision is None else decision.kind, is_on_trial=is_on_trial and last in ran).name,
    )


def _runs_as(kind: str | None, *, is_on_trial: bool) -> Override:
    """The first reason that applies, by the kind of decision that put the setting in force."""
    if is_on_trial:
        return Override.trial
    if kind == DecisionKind.prior:
        return Override.proven
    return Override.provisional if kind == DecisionKind.provisional else Override.incumbent


def _unweighed(
    alternatives: Collection[Mapping[str, Any]],
    here: Mapping[Candidate, MeasuredSetting],
    everywhere: Mapping[Candidate, MeasuredSetting],
) -> list[dict[str, Any]]:
    """Lines for measured settings that were no candidates of the last decision."""
    measured = {str(candidate): candidate for candidate in (*here, *everywhere)}
    known = {str(one["candidate"]) for one in alternatives}
    # Some are settings that NCCL ran instead of a requested candidate, whose decision used the same calls.
    renamed = {
        name.rpartition("/")[0]
        for one in alternatives
        if one.get("n_measurements") and (name := str(one["candidate"])) not in measured
    }
    return [
        {
            "candidate": name,
            "predicted_us": None,
            "predicted_low_us": None,
            "predicted_high_us": None,
            "is_guess": False,
            "measured_us": None,
            "n_measurements": 0,
            "spent_us": 0.0,
            "note": "",
        }
        for name in measured
        if name not in known and name.rpartition("/")[0] not in renamed
    ]


def _add_medians(
    alternatives: Sequence[dict[str, Any]],
    here: Mapping[Candidate, MeasuredSetting],
    everywhere: Mapping[Candidate, MeasuredSetting],
) -> None:
    by_name = [{str(candidate): found for candidate, found in known.items()} for known in (here, everywhere)]
    for one in alternatives:
        # The decision used calls that the store no longer has, or has under the setting that really ran.
        seen = one.get("measured_us"), one.get("n_measurements", 0)
        mine, all_jobs = (known.get(str(one["candidate"])) for known in by_name)
        one["job_median_us"], one["n_this_job"] = (mine.median_us, mine.n_calls) if mine is not None else seen
        counted = all_jobs is not None and all_jobs.n_calls >= one["n_this_job"]
        one["median_us"], one["n_all_jobs"] = (
            (all_jobs.median_us, all_jobs.n_calls)
            if all_jobs is not None and counted
            else (one["job_median_us"], one["n_this_job"])
        )


def _date_notes(alternatives: Sequence[dict[str, Any]], decisions: Sequence[Decision], setting: str) -> None:
    """Add its time to each note; drop old notes against the setting that is now in force."""
    settled = [(at, one) for at, one in enumerate(decisions) if one.kind != DecisionKind.explore]
    in_force_at = next((at for at, one in reversed(settled) if str(one.candidate) != setting), -1) + 1
    for one in alternatives:
        name, note = str(one["candidate"]), one.get("note") or ""
        noted = next((at for at in reversed(range(len(decisions))) if _is_noted(decisions[at], name, note)), None)
        one["note"] = "" if name == setting else note
        one["noted_step"] = decisions[noted].step if note and noted is not None else None
        one["noted_epoch"] = decisions[noted].epoch if note and noted is not None else None
        one["is_past"] = bool(note) and noted is not None and noted < in_force_at


def _is_noted(decision: Decision, name: str, note: str) -> bool:
    if decision.reason.startswith(f"{name}: {note}"):
        return True
    return note == f"given up: {decision.reason}" or (
        str(decision.candidate) == name and decision.reason.startswith(note)
    )
