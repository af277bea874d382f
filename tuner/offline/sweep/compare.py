"""Compares two sweeps, for example before and after a driver update: what changed beyond noise."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ....store.counted import faster
from ....store.errors import UserError
from ....store.records import BASELINE, Collective, Outcome, Source
from ....store.sqlite.database import Store
from ....store.sqlite.rows.measurements import candidate_of
from .grid import GridPoint, Place
from .surrogate import known_noise

SMALLEST_CHANGE = 0.02
"""Changes below this share are not reported, even if they are beyond noise."""
FEW_Z = 2.6 * 1.25
"""Half width of a median's 99 % interval in standard deviations of a mean, for points with few samples."""

Key = tuple[int, int, Place, str]
"""(n_ranks, n_nodes, place, setting)"""
Noises = tuple[float | None, float | None]
"""Noise (log) of one sample, before and after."""


class ChangedPoint(msgspec.Struct, frozen=True):
    """One setting in both sweeps. The verdict depends on whether the medians' intervals overlap.

    Intervals are 95 % by order statistics from 6 samples on; with fewer, as in active sweeps, 99 % by the noise of all
    samples of the sweep show together.
    """

    collective: str
    message_bytes: int
    n_ranks: int
    n_nodes: int
    setting: str
    before_us: float
    after_us: float
    change_percent: float
    verdict: str
    """`slower`, `faster`, `same`, or `unsure` if there are too few samples to know the noise."""


class SweepComparison(msgspec.Struct, frozen=True):
    """Common points of two sweeps, and their differences."""

    before: str
    after: str
    cells: tuple[ChangedPoint, ...]
    n_only_before: int
    n_only_after: int
    changed_winners: tuple[str, ...]
    """Places at which another setting is now the fastest, beyond noise."""

    def to_json(self) -> str:
        """One JSON document."""
        return msgspec.json.encode(self).decode()


def compare(store_path: Path, before: str, after: str) -> SweepComparison:
    """Compare two sweeps of one store: points that both measured, and changes beyond noise.

    Args:
        before: job id of a sweep, or a fabric id: all sweeps of it.

    Raises:
        UserError: there is no such sweep, or they have nothing in common.
    """
    with Store.open(store_path, read_only=True) as store:
        first, second = _cells_of(store, before), _cells_of(store, after)
    common = sorted(first.keys() & second.keys())
    for name, known in ((before, first), (after, second)):
        if not known:
            raise UserError(
                f"{name} has no measurements of its own",
                "a resumed sweep repeats none: name the one before, or --fresh",
            )
    if not common:
        raise UserError(f"{before} and {after} have no setting in common", "compare sweeps of the same collectives")
    noises = known_noise(list(first.values())), known_noise(list(second.values()))
    cells = tuple(_changed(key, first[key], second[key], noises) for key in common)
    return SweepComparison(
        before=before,
        after=after,
        cells=cells,
        n_only_before=len(first) - len(common),
        n_only_after=len(second) - len(common),
        changed_winners=tuple(_changed_winners(first, second, noises)),
    )


def render_comparison(result: SweepComparison, console: Console) -> None:
    """Print changes beyond noise, and how many points did not change."""
    changed = [one for one in result.cells if one.verdict in ("slower", "faster")]
    table = Table("collective", "bytes", "ranks", "setting", result.before, result.after, "change")
    for one in sorted(changed, key=lambda one: -abs(one.change_percent)):
        colour = "red" if one.verdict == "slower" else "green"
        table.add_row(
            one.collective,
            f"{one.message_bytes:,}",
            f"{one.n_ranks} on {one.n_nodes}",
            "NCCL's own" if one.setting == str(BASELINE) else one.setting,
            f"{one.before_us:,.1f} us",
            f"{one.after_us:,.1f} us",
            f"[{colour}]{faster(one.change_percent, 1)}[/]",
        )
    if changed:
        console.print(table)
    counts = {verdict: sum(one.verdict == verdict for one in result.cells) for verdict in ("same", "unsure")}
    console.print(
        f"{len(changed)} of {len(result.cells)} common settings changed beyond noise; {counts['same']} did not, "
        f"{counts['unsure']} have too few samples to say. Only before: {result.n_only_before}, "
        f"only after: {result.n_only_after}."
    )
    for words in result.changed_winners:
        console.print(words)


def _cells_of(store: Store, name: str) -> dict[Key, GridPoint]:
    jobs = {job.job_id for job in store.jobs()}
    if name in jobs:
        found = store.measurements(job_id=name, source=Source.sweep)
    elif name in store.fabrics():
        found = store.measurements(fabric_id=name, source=Source.sweep)
    else:
        sweeps = [job for job in sorted(jobs) if job.startswith("sweep-")]
        remedy = f"use one of {', '.join(sweeps[-4:])}" if sweeps else "it has none yet: run `zerotune sweep`"
        raise UserError(f"the store {store.path} has no sweep {name!r}", remedy)
    points: dict[Key, GridPoint] = {}
    for row in found[np.isin(found["outcome"], (Outcome.ok, Outcome.outlier))]:
        candidate = BASELINE
        if not row["is_default"]:
            candidate = candidate_of(int(row["algorithm"]), int(row["protocol"]), int(row["n_channels"]))
        place = Place(Collective(int(row["collective"])), int(row["message_bytes"]))
        key = (int(row["n_ranks"]), int(row["n_nodes"]), place, str(candidate))
        points.setdefault(key, GridPoint(place, candidate)).duration_us.append(float(row["duration_us"]))
    return points


def _changed(key: Key, before: GridPoint, after: GridPoint, noises: Noises) -> ChangedPoint:
    n_ranks, n_nodes, place, setting = key
    ratio = after.median_us / before.median_us
    return ChangedPoint(
        collective=place.collective.name,
        message_bytes=place.message_bytes,
        n_ranks=n_ranks,
        n_nodes=n_nodes,
        setting=setting,
        before_us=before.median_us,
        after_us=after.median_us,
        change_percent=100 * (ratio - 1),
        verdict=_verdict(before, after, noises),
    )


def _verdict(before: GridPoint, after: GridPoint, noises: Noises) -> str:
    (low, high), (new_low, new_high) = _interval(before, noises[0]), _interval(after, noises[1])
    if not (math.isfinite(high) and math.isfinite(new_high)):
        return "unsure"
    if abs(after.median_us / before.median_us - 1) < SMALLEST_CHANGE:
        return "same"
    if new_low > high:
        return "slower"
    return "faster" if new_high < low else "same"


def _interval(point: GridPoint, noise: float | None) -> tuple[float, float]:
    own = point.interval_us
    if math.isfinite(own[1]) or noise is None or len(point.duration_us) < 2:
        return own
    factor = math.exp(FEW_Z * noise / math.sqrt(len(point.duration_us)))
    return point.median_us / factor, point.median_us * factor


def _changed_winners(first: dict[Key, GridPoint], second: dict[Key, GridPoint], noises: Noises) -> list[str]:
    words = []
    places = sorted({key[:3] for key in first.keys() & second.keys()})
    for n_ranks, n_nodes, place in places:
        old, new = (
            min((point for key, point in points.items() if key[:3] == (n_ranks, n_nodes, place)), key=_median)
            for points in (first, second)
        )
        old_now = second.get((n_ranks, n_nodes, place, str(old.candidate)))
        if old.candidate == new.candidate or old_now is None:
            continue
        if _verdict(new, old_now, (noises[1], noises[1])) == "slower":
            where = f"{place.collective.name} {place.message_bytes:,} on {n_ranks} ranks"
            words.append(f"{where}: {new.candidate} wins now, it was {old.candidate}.")
    return words


def _median(point: GridPoint) -> float:
    return point.median_us
