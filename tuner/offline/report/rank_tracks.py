"""Draws one track per rank and communicator, with the calls of `rank_calls`."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from ....store.records import CommunicatorClass, Phase
from ....store.wire import FLAG_MATCHED
from .. import plots
from ..chrome_trace.events import SideBySide
from ..chrome_trace.named import by_field, collective_name, named
from .rank_calls import UNKNOWN_RANK, RankCalls

_LANE_INCHES: Final = 0.19
_AROUND_INCHES: Final = 1.2
_CALLS_PER_INCH: Final = 12
_MAX_INCHES: Final = 40.0
_COLOURS: Final = {
    Phase.forward_gather.name: "#3f83c4",
    Phase.backward_gather.name: "#8d6cc9",
    Phase.gradient_scatter.name: "#2f9a6d",
    Phase.post_step_gather.name: "#c08a1e",
}
"""Colours that are visible on white and on black; other phases are grey."""


def rank_tracks(calls: RankCalls) -> tuple[str, Figure]:
    """A caption, and each call as a bar on its rank's track; overlapping calls get further tracks."""
    communicators = list(dict.fromkeys(calls.rows["comm_id"].tolist()))
    letters = {comm_id: _letters(at) for at, comm_id in enumerate(communicators)}
    lanes, lane = _lanes(calls, letters)
    figure, (axes,) = plots.new_figure(_AROUND_INCHES + _LANE_INCHES * len(lanes))
    # With many calls, the picture gets wider, so that bars stay distinct.
    most_calls = int(np.bincount(lane).max())
    figure.set_figwidth(min(max(figure.get_figwidth(), most_calls / _CALLS_PER_INCH), _MAX_INCHES))
    phases = [named(Phase, value) or Phase.other.name for value in calls.rows["phase"].tolist()]
    begin_ms, waited_ms = calls.begin_us / 1e3, np.maximum(np.nan_to_num(calls.waited_us), 0.0) / 1e3
    duration_ms = calls.rows["duration_us"].astype(np.float64) / 1e3
    places = zip(begin_ms, waited_ms, duration_ms, lane, phases, _words(calls, letters), strict=True)
    for begin, waited, duration, row, phase, words in places:
        style = {"facecolor": _COLOURS.get(phase, plots.BEFORE)}
        if waited:
            plots.add_box(axes, begin, row - 0.4, waited, 0.8, words, alpha=0.3, **style)
        plots.add_box(axes, begin + waited, row - 0.4, duration - waited, 0.8, words, **style)
    for step, (begin_us, _) in calls.steps.items():
        axes.axvline(begin_us / 1e3, color=plots.MUTED, linewidth=0.9, linestyle=":")
        words = axes.text(begin_us / 1e3, 1, f"step {step}", va="bottom", color=plots.INK, fontsize=7.5)
        words.set_transform(axes.get_xaxis_transform())
    plots.name_rows(axes, lanes)
    axes.set_xlim(0, max([(begin_ms + duration_ms).max(), *(end_us / 1e3 for _, end_us in calls.steps.values())]))
    axes.set_xlabel("ms")
    shown = sorted(set(phases), key=lambda name: Phase[name])
    plots.add_legend(figure, {name.replace("_", " "): _COLOURS.get(name, plots.BEFORE) for name in shown})
    return _caption(calls, letters), figure


def _lanes(calls: RankCalls, letters: dict[int, str]) -> tuple[list[str], Any]:
    """Names of the lanes, and the lane of each call, shape (n,)."""
    names: list[str] = []
    lane = np.zeros(len(calls.rows), np.int64)
    for rank in np.unique(calls.rank).tolist():
        for comm_id, letter in letters.items():
            chosen = np.flatnonzero((calls.rank == rank) & (calls.rows["comm_id"] == comm_id))
            rows = SideBySide()
            ends_us = calls.begin_us[chosen] + calls.rows["duration_us"][chosen]
            for at, begin_us, end_us in zip(chosen.tolist(), calls.begin_us[chosen], ends_us, strict=True):
                lane[at] = len(names) + rows.row_of(float(begin_us), float(end_us))
            name = f"rank {rank}{f' {letter}' if len(letters) > 1 else ''}"
            names += [name, *[""] * (rows.n_rows - 1)][: rows.n_rows]
    return names, lane


def _words(calls: RankCalls, letters: dict[int, str]) -> Iterator[str]:
    """Text of a call that is shown under the pointer."""
    known = zip(by_field(calls.rows), calls.rank.tolist(), calls.waited_us, calls.last_rank.tolist(), strict=True)
    for row, rank, waited_us, last_rank in known:
        asked = "by plan" if row["flags"] & FLAG_MATCHED else "by NCCL"
        lines = [
            f"{collective_name(row)}, {asked}, {row['duration_us']:,.1f} us",
            f"{named(Phase, row['phase']) or 'other'}, step {row['step']}, rank {rank}, "
            f"communicator {letters[row['comm_id']]}",
        ]
        if last_rank == rank:
            lines.append("arrived last")
        elif last_rank != UNKNOWN_RANK:
            lines.append(f"waited {waited_us:,.1f} us for rank {last_rank}, which arrived last")
        yield "\n".join(lines)


def _caption(calls: RankCalls, letters: dict[int, str]) -> str:
    numbers = np.unique(calls.rows["step"]).tolist()
    which = f"Steps {numbers[0]:,} to {numbers[-1]:,}" if len(numbers) > 1 else f"Step {numbers[0]:,}"
    rows = {row["comm_id"]: row for row in by_field(calls.rows)}
    sizes = [
        f"{letter}: {CommunicatorClass(rows[comm_id]['n_ranks'], rows[comm_id]['n_nodes'])}"
        for comm_id, letter in letters.items()
    ]
    waits = ["Pale: waiting for the rank that arrives last"] if (calls.waited_us > 0).any() else []
    words = [
        f"{which}, settled ones, on one clock: a collective ends on all its ranks at once",
        *waits,
        f"Communicators: {'; '.join(sizes)}",
        *(one[0].upper() + one[1:] for one in calls.left_out),
        "All steps: zerotune store export timeline.json --to chrome",
    ]
    return ". ".join(words) + "."


def _letters(number: int) -> str:
    """A, B ... Z, AA, AB ..."""
    before, last = divmod(number, len(ascii_uppercase))
    return (_letters(before - 1) if before else "") + ascii_uppercase[last]
