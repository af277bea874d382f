"""The pictures of docs/design/prediction.md and ablation.md, from the figures of the other benchmarks.

    python -m benchmarks policy_regret --curves curves.json
    python -m benchmarks prediction_held_out --json > prediction.txt
    python -m benchmarks learning_pictures docs/pictures --curves curves.json --prediction prediction.txt

Writes regret.svg (regret by call of every policy), coverage.svg (90 % intervals, by what was left out) and
winners.svg (which candidate is fastest at which size on one shipped fabric; needs no other benchmark).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.lib.argument_types import a_file, a_folder_to_write
from benchmarks.lib.data.data_sets import shipped
from zerotune.store.records import Collective

SHOWN = ("nccl_default", "round_robin", "thompson", "coordinate_descent", "ours_cold", "ours_warm")
WINDOW_CALLS = 9
HEAT_FABRIC = "h100_ib_16"


Curves = dict[str, dict[str, list[float]]]


def curves_in(text: str) -> Curves:
    """What policy_regret.py wrote: data set -> policy -> regret by call."""
    path = a_file(text)
    try:
        found: Curves = json.loads(path.read_text(encoding="utf-8"))
        if not all(np.isfinite(values).all() for policies in found.values() for values in policies.values()):
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        raise argparse.ArgumentTypeError(f"{text} is not what policy_regret.py --curves writes") from None
    return found


def coverage_in(text: str) -> dict[str, float]:
    """Of what prediction_held_out.py printed: share of left-out points inside the winner's 90 % interval."""
    path = a_file(text)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        results = json.loads(next(line for line in reversed(lines) if line.startswith("{")))["results"]
        return {
            one["metric"].removeprefix("interval_coverage_90@").removesuffix(":kriging"): float(one["value"])
            for one in results
            if one["metric"].startswith("interval_coverage_90@") and one["metric"].endswith(":kriging")
            if "@fabric:" not in one["metric"]
        }
    except (StopIteration, ValueError, TypeError, KeyError):
        raise argparse.ArgumentTypeError(f"{text} is not what prediction_held_out.py --json prints") from None


def regret(files: list[Curves], out: Path) -> None:
    """Mean regret over keys by call, smoothed, one panel per data set."""
    curves = {name: one for curves in files for name, one in curves.items()}
    names = [name for name in curves if name != "as_believed"][:6]
    figure, panels = plt.subplots(2, 3, figsize=(10, 5), sharex=True, squeeze=False)
    for panel, name in zip(panels.flat, names, strict=False):
        for policy in SHOWN:
            values = np.array(curves[name].get(policy, []))
            if len(values):
                kernel = np.ones(WINDOW_CALLS) / WINDOW_CALLS
                smooth = np.convolve(np.pad(values, WINDOW_CALLS // 2, mode="edge"), kernel, mode="valid")
                panel.plot(smooth, label=policy, linewidth=2 if policy.startswith("ours") else 1)
        panel.set_title(name, fontsize=9)
        panel.set_yscale("symlog", linthresh=1.0)
        panel.set_ylim(0, 200)
    panels[0][0].legend(fontsize=6)
    for panel in panels[-1]:
        panel.set_xlabel("calls per key")
    for row in panels:
        row[0].set_ylabel("mean regret, %")
    _save(figure, out / "regret.svg")


def coverage(found: dict[str, float], out: Path) -> None:
    """Share of left-out points inside the winner's 90 % interval."""
    figure, panel = plt.subplots(figsize=(7, 0.3 * len(found) + 1))
    panel.axvspan(85, 95, color="0.9")
    panel.barh(list(found), list(found.values()), height=0.6)
    panel.axvline(90, color="black", linewidth=0.8)
    panel.set_xlim(0, 100)
    panel.set_xlabel("left-out medians inside the 90 % interval, %  (grey: what it should be)")
    panel.invert_yaxis()
    _save(figure, out / "coverage.svg")


def winners(out: Path) -> None:
    """How much slower than the best each candidate is, by size."""
    data = next(one for one in shipped(2.0) if one.name == HEAT_FABRIC)
    problems = [p for p in data.problems if p.key.collective is Collective.all_gather]
    regrets = np.array([[us / min(p.truth_us) - 1 for us in p.truth_us] for p in problems]).T
    shown = np.flatnonzero(regrets.min(axis=1) < 0.5)
    figure, panel = plt.subplots(figsize=(9, 0.22 * len(shown) + 1.5))
    image = panel.imshow(100 * regrets[shown], aspect="auto", cmap="viridis_r", vmin=0, vmax=50)
    for column in range(len(problems)):
        panel.plot(column, int(np.argmin(regrets[shown][:, column])), marker="*", color="red")
    panel.set_yticks(range(len(shown)), [str(problems[0].candidates[at]) for at in shown], fontsize=6)
    ticks = range(0, len(problems), 4)
    panel.set_xticks(ticks, [f"{problems[at].message_bytes >> 10:,} KiB" for at in ticks], fontsize=7)
    panel.set_title(f"all_gather on {HEAT_FABRIC} (emulated): slower than the best, %; star: the best", fontsize=9)
    figure.colorbar(image)
    _save(figure, out / "winners.svg")


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(f"{path} ({path.stat().st_size:,} bytes)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=a_folder_to_write, help="folder for the pictures")
    parser.add_argument("--curves", type=curves_in, nargs="+", help="what policy_regret.py --curves wrote")
    parser.add_argument("--prediction", type=coverage_in, help="what prediction_held_out.py --json printed")
    arguments = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "zerotune"
    plt.rcParams["svg.fonttype"] = "none"
    winners(arguments.out)
    if arguments.curves is not None:
        regret(arguments.curves, arguments.out)
    if arguments.prediction is not None:
        coverage(arguments.prediction, arguments.out)


if __name__ == "__main__":
    main()
