"""Names and arguments of collectives, steps and decisions in a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Final

from numpy.typing import NDArray

from ....store.counted import size_text
from ....store.records import (
    Algorithm,
    Collective,
    Decision,
    Outcome,
    Phase,
    Protocol,
    Source,
    TimingSource,
    size_class_range,
)
from ...traces.own.clocks import Span
from .events import Args, Track

_ROWS_AT_ONCE: Final = 4096
"""A row takes ten times the memory as Python values."""


def by_field(rows: NDArray[Any]) -> Iterator[dict[str, Any]]:
    """Each row of a structured array, shape (n,), as Python values by field."""
    names = rows.dtype.names or ()
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        for values in rows[at : at + _ROWS_AT_ONCE].tolist():
            yield dict(zip(names, values, strict=True))


def named(kind: type[IntEnum], value: int) -> str | None:
    """The name of a recorded value; None if it is not of that kind."""
    return kind(value).name if value in kind._value2member_map_ else None


def collective_name(row: Mapping[str, Any]) -> str:
    """Text such as `all_gather 4 MiB ring/ll128/16ch`; without the setting if it is unknown."""
    what = named(Collective, row["collective"]) or f"collective {row['collective']}"
    return " ".join(filter(None, (what, size_text(row["message_bytes"]), setting_that_ran(row))))


def setting_that_ran(row: Mapping[str, Any]) -> str | None:
    """Text such as `ring/ll128/16ch`, or `tree/any` for an unknown protocol; None if the algorithm is unknown."""
    algorithm = named(Algorithm, row["algorithm"])
    cell = [algorithm, named(Protocol, row["protocol"]) or "any"] if algorithm else []
    channels = [f"{row['n_channels']}ch"] if row["n_channels"] else []
    chunk = [f"{row['chunk_bytes'] // 1024}KiB"] if row["chunk_bytes"] > 1 else []
    return "/".join(cell + channels + chunk) or None


def collective_args(row: Mapping[str, Any], *, is_default: bool) -> dict[str, str | int | float | None]:
    """Arguments of a row of OBSERVATION_FIELDS or MEASUREMENT_FIELDS; unknown ones are None.

    Args:
        is_default: whether NCCL chose the setting, and no row of a plan.
    """
    pressure = row["memory_pressure"]
    return {
        "step": row["step"],
        "epoch": row["epoch"],
        "phase": named(Phase, row["phase"]),
        "message_bytes": row["message_bytes"],
        "setting_that_ran": setting_that_ran(row),
        "asked_by": "NCCL" if is_default else "plan",
        "n_ranks": row["n_ranks"],
        "n_nodes": row["n_nodes"],
        "timing_source": named(TimingSource, row["timing_source"]),
        "memory_pressure": round(pressure, 4) if pressure >= 0 else None,
        "outcome": named(Outcome, row["outcome"]) if row.get("outcome") else None,
        "source": named(Source, row["source"]) if row.get("source") else None,
    }


def draw_decisions(
    track: Track, decisions: Iterable[Decision], steps: Mapping[int, Span], epochs: Mapping[int, int]
) -> None:
    """Draw decisions as instants, each at the end of the newest step known when it was taken.

    Args:
        epochs: the first step under each epoch, for decisions that name no step.
    """
    placed = [(_known_until_us(one, steps, epochs), one) for one in decisions]
    for at_us, one in sorted(placed, key=lambda pair: pair[0]):
        track.instant(_decision_name(one), "decision", at_us, _decision_args(one))


def _known_until_us(decision: Decision, steps: Mapping[int, Span], epochs: Mapping[int, int]) -> float:
    if decision.step is not None and decision.step in steps:
        return steps[decision.step][1]
    first = epochs.get(decision.epoch)
    if decision.step is None and first is not None:
        return steps[first][0]
    earlier = [end_us for step, (_, end_us) in steps.items() if decision.step is not None and step <= decision.step]
    return max(earlier, default=0.0)


def _decision_name(decision: Decision) -> str:
    if decision.is_of_job:
        return decision.kind
    low_bytes, high_bytes = size_class_range(decision.key.size_class)
    sizes = f"{size_text(low_bytes)} to {size_text(high_bytes)}"
    return f"{decision.kind} {decision.key.collective.name} {sizes} {decision.candidate}"


def _decision_args(decision: Decision) -> Args:
    of_job: dict[str, str | int | float | None] = {
        "reason": decision.reason,
        "kind": decision.kind,
        "step": decision.step,
        "epoch": decision.epoch,
    }
    if decision.is_of_job:
        return of_job
    key = decision.key
    low_bytes, high_bytes = size_class_range(key.size_class)
    return of_job | {
        "setting_asked": str(decision.candidate),
        "collective": key.collective.name,
        "phase": key.phase.name,
        "min_bytes": low_bytes,
        "max_bytes": high_bytes,
        "n_ranks": key.communicator.n_ranks,
        "n_nodes": key.communicator.n_nodes,
        "predicted_us": decision.predicted_us,
        "baseline_us": decision.baseline_us,
        "n_measurements": decision.n_measurements,
    }
