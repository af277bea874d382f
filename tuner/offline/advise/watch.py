"""`zerotune advise --watch`: what would pay for a job while it runs, from what its daemon records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from zerotune.store.errors import UserError
from zerotune.store.sqlite.database import Store
from zerotune.tuner.advice.alternatives import Alternative, alternatives
from zerotune.tuner.advice.configuration import ZeroConfiguration
from zerotune.tuner.advice.problem import Problem
from zerotune.tuner.offline.advise.measured import measured
from zerotune.tuner.offline.advise.shown import name_of
from zerotune.tuner.offline.jobs.finding import job_of

EVERY_S: Final = 10.0
_LEAST_STEPS: Final = 20
"""The first steps of a job are slow for reasons of their own."""
_MOVED: Final = 0.02
"""A gain that moved by less is no news."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What would pay as of a step."""

    job: str
    step: int
    measured: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


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
        What would pay, whenever that has changed.

    Raises:
        UserError: there is no such job, or its steps cannot be this model's.
        StoreError: the store cannot be read.
    """
    if not path.is_file():
        raise UserError(f"there is no store at {path}", "begin a job with `zerotune launch --start-daemon`")
    told: News | None = None
    watched = job
    while True:
        with Store.open(path, read_only=True) as store:
            found = job_of(store, watched)
            steps = store.steps(found.job_id)
        watched, has_ended = found.job_id, found.ended_at_s is not None or found.is_lost
        if len(steps) >= _LEAST_STEPS:
            known = measured(problem, path, found.job_id, ran)
            news = News(
                job=found.title,
                step=steps[-1].step,
                measured=known.sentences,
                alternatives=tuple(alternatives(known.problem, ran)),
            )
            if told is None or _differs(told, news):
                told = news
                yield news
        elif has_ended:
            raise UserError(f"{found.title} ended after {len(steps)} steps", f"watch one of {_LEAST_STEPS} or more")
        if has_ended:
            return
        sleep(EVERY_S)


def _differs(before: News, after: News) -> bool:
    gains = [{one.change: one.gain.expected for one in news.alternatives} for news in (before, after)]
    return gains[0].keys() != gains[1].keys() or any(abs(gains[0][name] - gains[1][name]) > _MOVED for name in gains[0])


def render(news: News, ran: ZeroConfiguration, console: Console) -> None:
    """Print what would pay.

    Args:
        news: to print.
        ran: what the job runs.
        console: where.
    """
    if not news.alternatives:
        console.print(f"{news.job}, step {news.step}: nothing would pay more than {name_of(ran)}")
        return
    table = Table(
        "change", "to", "sequences per second", "memory",
        title=f"{news.job}, step {news.step}: what would pay more than {name_of(ran)}",
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
