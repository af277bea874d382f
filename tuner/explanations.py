"""`zerotune explain`: why each setting is what it is, read back from the store's decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from agent.nccl.catalog import parse_collective
from store.database import Store
from store.errors import UserError
from store.records import Decision, DecisionKey, Phase, size_class, size_class_range

MAX_ALTERNATIVES = 6


class Explanation(msgspec.Struct, frozen=True):
    """One decision key: the decision in force, what else was possible, and how it came to it."""

    key: DecisionKey
    min_bytes: int
    max_bytes: int
    decision: Decision
    alternatives: list[dict[str, Any]]
    n_explored: int
    history: list[str]


def explain(
    store_path: Path, job_id: str | None, collective: str | None, phase: str | None, message_bytes: int | None
) -> list[Explanation]:
    """Explanations of one job's decisions, the newest job's by default; filters may be None.

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
        jobs = [job.job_id for job in store.jobs()]
        if job_id is None and not jobs:
            raise UserError(f"{store_path} holds no job yet", "run one with `zerotune launch`")
        chosen = job_id or jobs[-1]
        if chosen not in jobs:
            raise UserError(f"no job {chosen!r} in {store_path}", f"known jobs: {', '.join(jobs[-5:]) or 'none'}")
        decisions = store.decisions(job_id=chosen)
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
    return [_explanation(key, by_key[key]) for key in sorted(by_key)]


def _explanation(key: DecisionKey, decisions: list[Decision]) -> Explanation:
    settled = [decision for decision in decisions if decision.kind != "explore"]
    low, high = size_class_range(key.size_class)
    return Explanation(
        key=key,
        min_bytes=low,
        max_bytes=high,
        decision=(settled or decisions)[-1],
        # The last decision of any kind saw the most evidence.
        alternatives=json.loads(decisions[-1].alternatives),
        n_explored=sum(decision.kind == "explore" for decision in decisions),
        history=[f"epoch {d.epoch}: {d.kind} {d.candidate}: {d.reason}" for d in settled],
    )


def render(explanations: list[Explanation], console: Console) -> None:
    """Print them; says so when there are none."""
    if not explanations:
        console.print("No decision fits. Without filters `zerotune explain` shows all of the newest job.")
        return
    for explained in explanations:
        key, decision = explained.key, explained.decision
        communicator = key.communicator
        console.print(
            f"\n[bold]{key.collective.name}[/] {key.phase.name}, {explained.min_bytes:,} to {explained.max_bytes:,} "
            f"bytes, {communicator.n_ranks} ranks on {communicator.n_nodes} nodes: [bold cyan]{decision.candidate}[/]"
        )
        console.print(f"  {decision.kind} at epoch {decision.epoch}: {decision.reason}")
        table = Table("setting", "predicted us (90 %)", "measured us", "timed", "note", box=None, padding=(0, 2))
        for alternative in explained.alternatives[:MAX_ALTERNATIVES]:
            measured = alternative["measured_us"]
            table.add_row(
                str(alternative["candidate"]),
                f"{alternative['predicted_us']:,.1f} "
                f"({alternative['predicted_low_us']:,.1f} to {alternative['predicted_high_us']:,.1f})",
                "-" if measured is None else f"{measured:,.1f}",
                str(alternative["n_measurements"]),
                str(alternative["note"]),
            )
        console.print(table)
        for line in explained.history[:-1]:
            console.print(f"  earlier: {line}", style="dim")
