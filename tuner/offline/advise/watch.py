"""`zerotune advise --watch`: better configurations for a running job, from its daemon's records."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from ....store.counted import counted
from ....store.errors import UserError
from ....store.sqlite.database import Store
from ...advice.prediction.memory import batch_that_fits, memory_share
from ...advice.prediction.step import spreads
from ...advice.problem import Measured, Problem, Range, ZeroConfiguration
from ...advice.search import BUCKETS_BYTES, PREFETCHES, RECOMPUTES, seconds_per_sequence
from ..jobs.finding import job_of
from ..jobs.listing import has_writer
from .measured import is_store, measured
from .shown import name_of

LEAST_GAIN: Final = 0.01
"""Smaller gains are not worth a restart, and are not shown."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A change that fits and pays."""

    change: str
    """`batch`, `bucket`, `prefetch`, `stage`, `recompute`, or two of them joined by "+"."""
    configuration: ZeroConfiguration
    gain: Range
    """Increase of sequences per second, as a share."""
    memory_share: float
    """Share of the GPU's memory, fragments included."""


def alternatives(problem: Problem, running: ZeroConfiguration) -> list[Alternative]:
    """The best of each kind of change that fits and gains LEAST_GAIN or more, the largest gain first.

    `problem` should have the job's measurements.
    """
    found: dict[str, Alternative] = {}
    before = seconds_per_sequence(problem, running)
    for change, changed in _changes(problem, running):
        share = memory_share(problem, changed)
        gain = before / seconds_per_sequence(problem, changed) - 1
        if share > 1 or gain < LEAST_GAIN:
            continue
        if change not in found or gain > found[change].gain.expected:
            found[change] = Alternative(
                change=change,
                configuration=changed,
                gain=gain_of(problem, running, changed),
                memory_share=share,
            )
    return sorted(found.values(), key=lambda one: -one.gain.expected)


def _changes(problem: Problem, running: ZeroConfiguration) -> Iterator[tuple[str, ZeroConfiguration]]:
    replace = msgspec.structs.replace
    for bucket in BUCKETS_BYTES:
        yield "bucket", replace(running, bucket_bytes=bucket)
    if running.stage == 3:
        for depth in PREFETCHES:
            yield "prefetch", replace(running, prefetch=depth)
    for batch in _larger_batches(problem, running):
        yield "batch", replace(running, micro_batch=batch)
    for change, field, values in (
        ("stage", "stage", (1, 2, 3) if problem.n_groups(running) > 1 else ()),
        ("recompute", "recompute", RECOMPUTES),
    ):
        for value in values:
            if value == getattr(running, field):
                continue
            changed = replace(running, **{field: value})
            if changed.stage != 3:
                changed = replace(changed, shard_ranks=0)
            if changed.recompute != "full":
                changed = replace(changed, partition_activations=False, offload_activations=False)
            fits = batch_that_fits(problem, changed)
            if fits >= running.micro_batch:
                yield change, changed
            if fits and fits != running.micro_batch:
                yield f"{change}+batch", replace(changed, micro_batch=fits)


def _larger_batches(problem: Problem, running: ZeroConfiguration) -> list[int]:
    """Doublings, and the largest that fits."""
    largest = batch_that_fits(problem, running)
    doubled = [running.micro_batch << place for place in range(1, 12)]
    return [batch for batch in (*doubled, largest) if running.micro_batch < batch <= largest]


def gain_of(problem: Problem, running: ZeroConfiguration, changed: ZeroConfiguration) -> Range:
    """Increase of sequences per second over the job's configuration, as a share.

    Errors that both share cancel, so the range is that of a ratio: computation and network vary by their spreads, and
    the error of comparisons in published runs is added.
    """
    compute, network = problem.measured.compute_factor or 1.0, problem.measured.network_factor or 1.0
    expected = seconds_per_sequence(problem, running) / seconds_per_sequence(problem, changed)
    ratios = [expected]
    for compute_log, network_log in itertools.product(*((-one, one) for one in spreads(problem))):
        moved = Measured(compute * math.exp(compute_log), network * math.exp(network_log))
        other = msgspec.structs.replace(problem, measured=moved)
        ratios.append(seconds_per_sequence(other, running) / seconds_per_sequence(other, changed))
    same_blocks = msgspec.structs.replace(running, bucket_bytes=changed.bucket_bytes, prefetch=changed.prefetch)
    constants = problem.constants
    overlap_spread = constants.overlap_error * abs(math.log(expected)) + constants.overlap_floor
    error = math.exp(overlap_spread if changed == same_blocks else constants.comparison_spread)
    return Range(min(ratios) / error - 1, expected - 1, max(ratios) * error - 1)


EVERY_S: Final = 10.0
_LEAST_STEPS: Final = 20
"""Steps that a job needs: its first steps are slower than others."""
_STILL_FITS: Final = 1.02
"""Share of a GPU's memory: measured pressure varies, and a change reported earlier may have used it up."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """Changes worth reporting at a step, and not reported before."""

    job: str
    step: int
    measured: tuple[str, ...]
    ranges: str
    """Sources of the gains' ranges."""
    alternatives: tuple[Alternative, ...]
    """Changes that are new, or whose gain left the reported range."""
    withdrawn: tuple[str, ...]
    """Reported changes that no longer fit, or gain less than the reported range."""


def watch(
    problem: Problem,
    path: Path,
    job: str | None,
    ran: ZeroConfiguration,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[News]:
    """Worthwhile changes of a running job until it ends: at first all, then those that left their reported ranges.

    A job that has ended gives its last news.

    Args:
        job: id or name; None: the newest that trained.
        sleep: waits between two looks at the store.

    Raises:
        UserError: there is no such job, or its steps cannot be this model's, or no daemon records them.
    """
    if not path.is_file():
        raise UserError(f"there is no store at {path}", "begin a job with `zerotune launch --daemon`")
    if not is_store(path):
        raise UserError(f"{path} is no store, and nothing else is written while a job runs", "name its daemon's store")
    reported: dict[str, Alternative] | None = None
    watched = job
    while True:
        with Store.open(path, read_only=True) as store:
            found = job_of(store, watched)
            steps = store.steps(found.job_id)
        watched, has_ended = found.job_id, found.ended_at_s is not None or found.is_lost
        if len(steps) >= _LEAST_STEPS:
            known = measured(problem, path, found.job_id, ran)
            fresh, withdrawn = _unreported(reported or {}, known.problem, ran)
            if reported is None or fresh or withdrawn:
                reported = {name: one for name, one in (reported or {}).items() if name not in withdrawn}
                reported |= {one.change: one for one in fresh}
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
        if reported is None and not has_writer(path):
            raise UserError(f"no daemon runs that would record {found.title}", "start `zerotune daemon` first")
        sleep(EVERY_S)


def _unreported(
    reported: dict[str, Alternative], problem: Problem, ran: ZeroConfiguration
) -> tuple[list[Alternative], list[str]]:
    """Worthwhile changes that are new or differ from the report, and names of those no longer worthwhile."""
    found = {one.change: one for one in alternatives(problem, ran)}
    fresh, withdrawn = [one for name, one in found.items() if name not in reported], []
    for name, before in reported.items():
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
    """Print changes that would be faster than the job's configuration `ran`."""
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
