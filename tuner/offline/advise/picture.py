"""Advice as a picture: a step of the best three, and throughput over nodes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from ....store.errors import UserError
from ...advice.hardware.clusters import Cluster
from ...advice.hardware.network import FabricNetwork
from ...advice.prediction.step import spans
from ...advice.problem import Problem
from ...advice.search import Choice, Wanted, fastest
from .. import plots
from .shown import name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

N_TIMELINES: Final = 3
_NODES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_ROWS: Final = {"compute": 0, "network": 1, "replicas": 1}
_COLOURS: Final = {
    "forward": plots.BEFORE,
    "backward": plots.AFTER,
    "optimizer": plots.INK,
    "gather": plots.EXPOSED,
    "reduce": plots.MUTED,
}
_MAX_SPANS: Final = 2000
"""Spans of one timeline; a file with more is too large to open."""


def draw(problem: Problem, choices: tuple[Choice, ...], wanted: Wanted) -> Figure:
    """The picture; `wanted` applies to other numbers of nodes as well."""
    shown = choices[:N_TIMELINES]
    heights = [0.8] * len(shown) + [2.2]
    figure, axes = plots.new_figure(
        sum(heights) + 0.6 * (len(heights) + 1), n_rows=len(heights), height_ratios=heights
    )
    for one, choice in zip(axes, shown, strict=False):
        _timeline(one, problem, choice)
    plots.add_legend(figure, _COLOURS)
    _over_nodes(axes[-1], problem, wanted)
    return figure


def _timeline(axes: Axes, problem: Problem, choice: Choice) -> None:
    found = spans(problem, choice.configuration)
    for span in found[:_MAX_SPANS]:
        row, colour = _ROWS[span.stream], _COLOURS[span.kind]
        plots.add_box(axes, span.begin_s, row - 0.4, span.end_s - span.begin_s, 0.8, facecolor=colour)
    plots.name_rows(axes, ["compute", "network"])
    axes.set_xlim(0, max(span.end_s for span in found))
    axes.grid(visible=False)
    axes.set_title(name_of(choice.configuration), loc="left", fontsize=9)
    axes.set_xlabel("seconds")


def _over_nodes(axes: Axes, problem: Problem, wanted: Wanted) -> None:
    asked = problem.cluster.n_nodes
    points = []
    for n_nodes in sorted({*(count for count in _NODES if count <= 4 * asked), asked}):
        with contextlib.suppress(UserError):  # no network
            cluster = _scaled(problem.cluster, n_nodes)
            best = fastest(msgspec.structs.replace(problem, cluster=cluster), wanted)
            if best is not None:  # None: too few nodes, or they cannot divide the batch
                points.append((n_nodes, best.step.tokens_per_s, best.step.extrapolated))
    nodes = [n for n, _, _ in points]
    axes.fill_between(
        nodes, [r.low for _, r, _ in points], [r.high for _, r, _ in points], color=plots.AFTER, alpha=0.2
    )
    axes.plot(nodes, [r.expected for _, r, _ in points], color=plots.AFTER, marker="o", markersize=3)
    beyond = [(n, r.expected) for n, r, extrapolated in points if extrapolated]
    if beyond:
        axes.plot(*zip(*beyond, strict=True), "o", color=plots.EXPOSED, markersize=4, label="extrapolated")
        axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(nodes, [str(n) for n in nodes])
    axes.set_xlabel("nodes")
    axes.set_ylabel("tokens per second")


def _scaled(cluster: Cluster, n_nodes: int) -> Cluster:
    """The problem with another number of the same nodes."""
    network = cluster.network
    if isinstance(network, FabricNetwork):
        network = FabricNetwork(network.fabric, n_nodes)
        network.known_nodes = cluster.network.known_nodes
    return Cluster(cluster.name, n_nodes, cluster.gpu, network, cluster.gpus_per_node)
