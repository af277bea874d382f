"""One track per rank and communicator, as plotly draws them: see `rank_calls`, which says what is on them."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any, Final, NamedTuple

import numpy as np

from zerotune.store.records import CommunicatorClass, Phase
from zerotune.store.wire import FLAG_MATCHED
from zerotune.tuner.offline import plots
from zerotune.tuner.offline.chrome_trace.named import by_field, collective_name, named
from zerotune.tuner.offline.chrome_trace.side_by_side import SideBySide
from zerotune.tuner.offline.report.interactive import SMALL, in_script
from zerotune.tuner.offline.report.rank_calls import UNKNOWN_RANK, RankCalls

LANE_PIXELS: Final = 18
AROUND_PIXELS: Final = 130
LEAST_PIXELS: Final = 640
"""On a narrow screen it is wider than that."""
COLOURS: Final = {
    Phase.forward_gather.name: "#3f83c4",
    Phase.backward_gather.name: "#8d6cc9",
    Phase.gradient_scatter.name: "#2f9a6d",
    Phase.post_step_gather.name: "#c08a1e",
}
"""Seen on white and on black; the other phases, and waiting, are grey."""
_HOVER: Final = "%{customdata}<br>%{base:.6~g} to %{x:.6~g} ms<extra></extra>"


class RankTracks(NamedTuple):
    """The picture."""

    specification: str
    """JSON of `data` and `layout`."""
    caption: str


def rank_tracks(calls: RankCalls) -> RankTracks:
    """Draw each call as a bar on its rank's track; those that overlap get tracks of their own."""
    communicators = list(dict.fromkeys(calls.rows["comm_id"].tolist()))
    letters = {comm_id: _letters(at) for at, comm_id in enumerate(communicators)}
    lanes, lane = _lanes(calls, letters)
    words = np.array(list(_words(calls, letters)), object)
    phases = [named(Phase, value) or "other" for value in calls.rows["phase"].tolist()]
    duration_ms = calls.rows["duration_us"].astype(np.float64) / 1e3
    data = [
        _bars(np.array([one == phase for one in phases]), calls, lane, duration_ms)
        | {"name": phase.replace("_", " "), "marker": {"color": COLOURS.get(phase, plots.BEFORE)}}
        | {"customdata": words[[one == phase for one in phases]].tolist(), "hovertemplate": _HOVER}
        for phase in sorted(set(phases), key=lambda name: Phase[name])
    ]
    waited = calls.waited_us > 0
    if waited.any():
        data.append(
            _bars(waited, calls, lane, calls.waited_us / 1e3)
            | {"name": "waits for the last rank", "marker": {"color": plots.GRID, "opacity": 0.75}, "hoverinfo": "skip"}
        )
    return RankTracks(in_script({"data": data, "layout": _layout(calls, lanes)}), _caption(calls, letters))


def _bars(which: Any, calls: RankCalls, lane: Any, width_ms: Any) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "width": 0.8, "y": lane[which].tolist(),
        "base": np.round(calls.begin_us[which] / 1e3, 6).tolist(), "x": np.round(width_ms[which], 6).tolist(),
    }  # fmt: skip


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
    """What is shown where a call is hovered over."""
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
        yield "<br>".join(lines)


def _layout(calls: RankCalls, lanes: list[str]) -> dict[str, Any]:
    line = {"color": plots.MUTED, "width": 1, "dash": "dot"}
    at_ms = {step: begin_us / 1e3 for step, (begin_us, _) in calls.steps.items()}
    end_ms = max(
        [float((calls.begin_us + calls.rows["duration_us"]).max()), *(end_us for _, end_us in calls.steps.values())]
    ) / 1e3  # fmt: skip
    above = {"xref": "x", "yref": "paper", "showarrow": False}
    return {
        "minwidth": LEAST_PIXELS,
        "height": AROUND_PIXELS + LANE_PIXELS * len(lanes),
        "xaxis": {"title": {"text": "ms"}, "range": [0, end_ms], "anchor": "y"},
        "yaxis": {
            "tickvals": list(range(len(lanes))), "ticktext": lanes, "range": [len(lanes) - 0.5, -0.5],
            "tickfont": {"size": SMALL}, "showgrid": False,
        },
        "shapes": [
            {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line}
            for x in at_ms.values()
        ],
        "annotations": [
            {**above, "x": x, "y": 1, "text": f"step {step}", "xanchor": "left", "yanchor": "bottom"}
            for step, x in at_ms.items()
        ],
        "bargap": 0,
        "legend": {"y": 0, "yanchor": "bottom", "yref": "container"},
    }  # fmt: skip


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
        "All steps: zerotune export --to perfetto",
    ]
    return ". ".join(words) + "."


def _letters(number: int) -> str:
    """A, B ... Z, AA, AB ..."""
    before, last = divmod(number, len(ascii_uppercase))
    return (_letters(before - 1) if before else "") + ascii_uppercase[last]
