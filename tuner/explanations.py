"""`zerotune explain`: why each setting is what it is, read back from the store's decisions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from agent.nccl.catalog import parse_collective
from store.database import Store
from store.errors import UserError
from store.records import Candidate, Decision, DecisionKey, Phase, size_class, size_class_range
from tuner.comparison import Measured, Medians, alternatives_of, medians
from tuner.jobs import job_of
from tuner.wording import exact_range

MAX_UNSEEN = 4
MEANINGS: Final = (
    "expected: foretold from the predictions and from what this job had measured until the key's last decision;"
    " guessed: from the predictions alone. In a reason, predicted is what was expected before that trial; what is"
    " predicted to be slower goes on trial where its interval leaves enough to be gained. Medians are"
    " of what the store has now."
)


class Explanation(msgspec.Struct, frozen=True):
    """One decision key: the decision in force, what else was possible, and how it came to it."""

    key: DecisionKey
    min_bytes: int
    max_bytes: int
    decision: Decision
    alternatives: list[dict[str, Any]]
    """Every candidate: what the last decision expected of it, with the 90 % interval (`predicted_us`,
    `predicted_low_us`, `predicted_high_us`; `is_guess` where nothing that this job measured had a part in that), had
    seen of it (`measured_us`, `n_measurements`) and had spent on trying it (`spent_us`); and what is in the store by
    now: median and calls of this job (`job_median_us`, `n_this_job`) and of all jobs on the fabric (`median_us`,
    `n_all_jobs`).
    """
    is_guess: bool
    """Whether the expectations are starting guesses."""
    decided_at_s: float
    """When the last decision was taken: the expectations are of then."""
    n_explored: int
    """Candidates that were on trial."""
    spent_us: float
    """What exploring this key has cost, as the budget counts it."""
    history: list[str]


def explain(
    store_path: Path, job_id: str | None, collective: str | None, phase: str | None, message_bytes: int | None
) -> list[Explanation]:
    """Explanations of one job's decisions, by default the newest's that trained; filters may be None.

    Raises:
        UserError: no store, no such job, an unknown collective or phase.
        StoreError: the store cannot be read.
    """
    if not store_path.exists():
        raise UserError(f"there is no store at {store_path}", "name one with --store or run a job first")
    wanted_collective = None if collective is None else parse_collective(collective)
    if phase is not None and phase not in Phase.__members__:
        raise UserError(f"unknown phase {phase!r}", f"use one of {', '.join(Phase.__members__)}")
    if message_bytes is not None and message_bytes < 1:
        raise UserError(f"--message-bytes {message_bytes} is not positive", "give the total size in bytes")
    with Store.open(store_path, read_only=True) as store:
        chosen = job_of(store, job_id).job_id
        decisions = store.decisions(job_id=chosen)
        fabrics = dict.fromkeys(decision.fabric_id for decision in decisions)
        here = medians([line for fabric_id in fabrics for line in store.statistics(fabric_id, chosen)])
        everywhere = medians([line for fabric_id in fabrics for line in store.statistics(fabric_id)])
    by_key: dict[DecisionKey, list[Decision]] = {}
    for decision in decisions:
        key = decision.key
        if wanted_collective is not None and key.collective != wanted_collective:
            continue
        if phase is not None and key.phase.name != phase:
            continue
        if message_bytes is not None and key.size_class != size_class(message_bytes):
            continue
        by_key.setdefault(key, []).append(decision)
    return explained(by_key, here, everywhere)


def explained(
    decisions: Mapping[DecisionKey, Sequence[Decision]], here: Medians, everywhere: Medians
) -> list[Explanation]:
    """Explanations by key, from each key's decisions in order and the measured medians of this job and of all jobs."""
    return [_explanation(key, decisions[key], here.get(key, {}), everywhere.get(key, {})) for key in sorted(decisions)]


def _explanation(
    key: DecisionKey,
    decisions: Sequence[Decision],
    here: Mapping[Candidate, Measured],
    everywhere: Mapping[Candidate, Measured],
) -> Explanation:
    settled = [decision for decision in decisions if decision.kind != "explore"]
    low, high = size_class_range(key.size_class)
    # The last decision of any kind saw the most evidence.
    alternatives = alternatives_of(decisions[-1])
    by_name = [{str(candidate): found for candidate, found in known.items()} for known in (here, everywhere)]
    for one in alternatives:
        # What the store has no longer, or under the name of what NCCL made of it, the decision has seen.
        seen = one.get("measured_us"), one.get("n_measurements", 0)
        mine, all_jobs = (known.get(str(one["candidate"])) for known in by_name)
        one["job_median_us"], one["n_this_job"] = (mine.median_us, mine.n_calls) if mine is not None else seen
        counted = all_jobs is not None and all_jobs.n_calls >= one["n_this_job"]
        one["median_us"], one["n_all_jobs"] = (
            (all_jobs.median_us, all_jobs.n_calls)
            if all_jobs is not None and counted
            else (one["job_median_us"], one["n_this_job"])
        )
    return Explanation(
        key=key,
        min_bytes=low,
        max_bytes=high,
        decision=(settled or decisions)[-1],
        alternatives=alternatives,
        is_guess=bool(alternatives) and all(one.get("is_guess", False) for one in alternatives),
        decided_at_s=decisions[-1].decided_at_s,
        n_explored=len({decision.candidate for decision in decisions if decision.kind == "explore"}),
        spent_us=sum(float(one.get("spent_us", 0.0)) for one in alternatives),
        history=[f"{_when(d)}: {d.kind} {d.candidate}: {d.reason}" for d in decisions],
    )


def _when(decision: Decision) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.decided_at_s))
    return f"{clock}, epoch {decision.epoch}"


def render(explanations: list[Explanation], console: Console) -> None:
    """Print them; says so when there are none."""
    if not explanations:
        console.print("Nothing has been decided for this job: NCCL's own choice ran throughout. --job names another.")
        return
    for explained in explanations:
        key, decision = explained.key, explained.decision
        sizes = exact_range(explained.min_bytes, explained.max_bytes)
        console.print(
            f"\n[bold]{key.collective.name}[/] {key.phase.name}, {sizes} bytes, {key.communicator}:"
            f" [bold cyan]{decision.candidate}[/]"
        )
        guesses = f"model {decision.model_id}" if decision.model_id else "NCCL's cost, no model yet"
        console.print(f"  {decision.kind}, {_when(decision)}: {decision.reason}")
        n_tried = explained.n_explored
        tried = "no candidate was on trial here"
        if n_tried:
            tried = f"{n_tried} candidate{'s were' if n_tried > 1 else ' was'} on trial here, which cost"
            tried += f" {explained.spent_us:,.0f} us"
        console.print(f"  predictions by {guesses}; {tried}")
        # Notes below, not beside: on 80 columns they would leave the figures no room.
        table = Table("  setting", f"{_outlook(explained)} us (90 %)", "this job (calls)", "all jobs (calls)", box=None)
        notes = []
        for one in shown(explained.alternatives):
            table.add_row(
                f"  {one['candidate']}",
                f"{one['predicted_us']:,.1f} ({one['predicted_low_us']:,.1f}..{one['predicted_high_us']:,.1f})",
                _median(one["job_median_us"], one["n_this_job"]),
                _median(one["median_us"], one["n_all_jobs"]),
            )
            if one["note"]:
                notes.append(f"  {one['candidate']}: {one['note']}")
        console.print(table)
        for line in notes:
            console.print(line, highlight=False)
        for line in explained.history[:-1]:
            console.print(f"  earlier: {line}", style="dim")
    console.print(f"\n{MEANINGS}", style="dim", highlight=False)


def render_none(known: list[Explanation], console: Console) -> None:
    """Nothing fits what was asked for: print what there is."""
    if not known:
        render(known, console)
        return
    console.print("No decision fits. NCCL's own choice runs where none is. This job has decisions for:")
    sizes: dict[str, list[str]] = {}
    for one in known:
        place = f"{one.key.collective.name} {one.key.phase.name}"
        sizes.setdefault(place, []).append(exact_range(one.min_bytes, one.max_bytes))
    for place, ranges in sizes.items():
        console.print(f"  {place}: {'; '.join(ranges)} bytes", highlight=False)


def _outlook(explained: Explanation) -> str:
    return "guessed" if explained.is_guess else "expected"


def shown(alternatives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured, and the best of what was not; `--json` has them all."""
    unseen = [one for one in alternatives if not one["n_all_jobs"]][:MAX_UNSEEN]
    return [one for one in alternatives if one["n_all_jobs"] or one in unseen]


def _median(us: float | None, n_calls: int) -> str:
    return "-" if us is None else f"{us:,.1f} ({n_calls:,})"
