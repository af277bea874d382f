"""`zerotune advise --watch`: what would pay for a job while it runs, from what its daemon records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from zerotune.store.counted import counted
from zerotune.store.errors import UserError
from zerotune.store.sqlite.database import Store
from zerotune.tuner.advice.alternatives import Alternative, alternatives, gain_of
from zerotune.tuner.advice.configuration import ZeroConfiguration
from zerotune.tuner.advice.prediction.memory import memory_share
from zerotune.tuner.advice.prediction.step import spreads
from zerotune.tuner.advice.problem import Problem
from zerotune.tuner.offline.advise.measured import is_store, measured
from zerotune.tuner.offline.advise.shown import name_of
from zerotune.tuner.offline.jobs.finding import job_of
from zerotune.tuner.offline.jobs.listing import has_writer

EVERY_S: Final = 10.0
_LEAST_STEPS: Final = 20
"""The first steps of a job are slow for reasons of their own."""
_STILL_FITS: Final = 1.02
"""Of a GPU's memory: measured pressure moves a little, and what was told may have filled it."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What would pay as of a step, and was not said before."""

    job: str
    step: int
    measured: tuple[str, ...]
    ranges: str
    """What gains' ranges come from."""
    alternatives: tuple[Alternative, ...]
    """Those that are new, or whose gain left the range that was told."""
    withdrawn: tuple[str, ...]
    """Changes that were told and no longer fit, or gain less than the range that was told."""


def watch(
    problem: Problem,
    path: Path,
    job: str | None,
    ran: ZeroConfiguration,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[News]:
    """News of a job, until it ends; of one that has ended, its last word.

    Args:
        problem: model, machine and software of the job.
        path: the store that its daemon writes.
        job: its id or name; None: the newest that trained.
        ran: what it runs.
        sleep: waits between two looks.

    Yields:
        What would pay: at first all, then what left the ranges that were told.

    Raises:
        UserError: there is no such job, or its steps cannot be this model's, or no daemon records them.
        StoreError: the store cannot be read.
    """
    if not path.is_file():
        raise UserError(f"there is no store at {path}", "begin a job with `zerotune launch --start-daemon`")
    if not is_store(path):
        raise UserError(f"{path} is no store, and nothing else is written while a job runs", "name its daemon's store")
    told: dict[str, Alternative] | None = None
    watched = job
    while True:
        with Store.open(path, read_only=True) as store:
            found = job_of(store, watched)
            steps = store.steps(found.job_id)
        watched, has_ended = found.job_id, found.ended_at_s is not None or found.is_lost
        if len(steps) >= _LEAST_STEPS:
            known = measured(problem, path, found.job_id, ran)
            fresh, withdrawn = _unsaid(told or {}, known.problem, ran)
            if told is None or fresh or withdrawn:
                told = {name: one for name, one in (told or {}).items() if name not in withdrawn}
                told |= {one.change: one for one in fresh}
                yield News(
                    job=found.title,
                    step=steps[-1].step,
                    measured=known.sentences,
                    ranges=_where_ranges_come_from(known.problem),
                    alternatives=tuple(fresh),
                    withdrawn=tuple(withdrawn),
                )
        elif has_ended:
            n_steps = 1 + steps[-1].step if steps else 0
            raise UserError(
                f"{found.title} ended after {counted(n_steps, 'step')}, {len(steps)} of them with a time",
                f"watch one that has {_LEAST_STEPS} or more",
            )
        if has_ended:
            return
        if told is None and not has_writer(path):
            raise UserError(f"no daemon runs that would record {found.title}", "start `zerotune daemon` first")
        sleep(EVERY_S)


def _unsaid(
    told: dict[str, Alternative], problem: Problem, ran: ZeroConfiguration
) -> tuple[list[Alternative], list[str]]:
    """What pays and was not told, or not so; names of changes that were told and pay no more."""
    found = {one.change: one for one in alternatives(problem, ran)}
    fresh, withdrawn = [one for name, one in found.items() if name not in told], []
    for name, before in told.items():
        one, low, high = found.get(name), before.gain.low, before.gain.high
        is_possible = memory_share(problem, before.configuration) <= _STILL_FITS
        gain = one.gain.expected if one else gain_of(problem, ran, before.configuration).expected
        if is_possible and low <= gain <= high:
            continue
        if one:
            fresh.append(one)
        else:
            withdrawn.append(name)
    return sorted(fresh, key=lambda one: -one.gain.expected), withdrawn


def _where_ranges_come_from(problem: Problem) -> str:
    constants, known = problem.constants, problem.measured
    computation, network = (math.expm1(one) for one in spreads(problem))
    return (
        f"nine of ten gains lie in their ranges if computation is at most {computation:.0%} off"
        f" ({'measured' if known.compute_factor else 'assumed'}), the network {network:.0%}"
        f" ({'measured' if known.network_factor else 'assumed'}), and a comparison"
        f" {math.expm1(constants.comparison_spread):.0%} as in published runs, or"
        f" {constants.overlap_error:.0%} of the gain and {math.expm1(constants.overlap_floor):.0%} of the step where"
        " only bucket or prefetch change"
    )


def render(news: News, ran: ZeroConfiguration, console: Console) -> None:
    """Print what would pay.

    Args:
        news: to print.
        ran: what the job runs.
        console: where.
    """
    at = f"{news.job}, step {news.step}"
    for name in news.withdrawn:
        console.print(f"{at}: {name} would not pay any more")
    if not news.alternatives:
        if not news.withdrawn:
            console.print(f"{at}: nothing would pay more than {name_of(ran)}")
        return
    table = Table(
        "change", "to", "sequences per second", "memory",
        title=f"{at}: what would pay more than {name_of(ran)}",
    )  # fmt: skip
    for one in news.alternatives:
        gain = one.gain
        table.add_row(
            one.change,
            _changed(ran, one.configuration),
            f"{gain.expected:+.0%} ({gain.low:+.0%} to {gain.high:+.0%})",
            f"{one.memory_share:.0%}",
        )
    console.print(table)
    for sentence in news.measured:
        console.print(f"Measured: {sentence}.")
    console.print(f"Ranges: {news.ranges}.")


def _changed(before: ZeroConfiguration, after: ZeroConfiguration) -> str:
    """The fields that differ, as `--ran` writes them."""
    words = []
    names = {"stage": "stage", "micro_batch": "batch", "recompute": "recompute", "prefetch": "prefetch"}
    for field, name in names.items():
        if getattr(before, field) != getattr(after, field):
            words.append(f"{name}={getattr(after, field)}")
    if before.bucket_bytes != after.bucket_bytes and after.bucket_bytes is not None:
        words.append(f"bucket-mb={after.bucket_bytes >> 20}")
    return ",".join(words)
