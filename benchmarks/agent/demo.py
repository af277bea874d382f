"""What `zerotune demo` shows, as figures, and as the README's picture: step time with the agent off and on.

python -m benchmarks demo [--json] [--steps N] [--picture FILE]

Times are those of the emulated NCCL's virtual clock; medians are over the last quarter of the steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.argument_types import a_file_to_write, positive
from benchmarks.lib.reporting import Result, options_of, report
from zerotune.tuner.offline.plots import AFTER, BEFORE, INK, new_figure, save


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=positive, default=500, metavar="N", help="of each run")
    parser.add_argument("--picture", type=a_file_to_write, metavar="FILE", help="draw the step times as SVG or PNG")
    arguments = parser.parse_args()
    if arguments.picture is not None and arguments.picture.suffix not in (".svg", ".png"):
        parser.error(f"--picture {arguments.picture}: pictures are .svg or .png files; name one")
    off, on = run(arguments.steps)
    if arguments.picture is not None:
        draw(step_times_us(off), step_times_us(on), arguments.picture)
    losses = [[step["loss_hex"] for step in one["steps"]] for one in (off, on)]
    report(
        "demo",
        [
            *changes(off, on, "step_time", "duration_us"),
            *changes(off, on, "exposed_communication", "exposed_us"),
            Result("steps_with_another_loss", sum(a != b for a, b in zip(*losses, strict=True)), "steps", "0"),
            Result("n_disagreements", off["n_disagreements"] + on["n_disagreements"], "calls", "0"),
        ],
        as_json=arguments.json,
    )


def run(n_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "zerotune.tuner.cli", "demo", "--out", folder, "--steps", str(n_steps)]
        subprocess.run(command, stdout=sys.stderr, check=True)
        off, on = (json.loads((Path(folder) / name).read_text()) for name in ("off.json", "on.json"))
    return off, on


def changes(off: dict[str, Any], on: dict[str, Any], name: str, field: str) -> list[Result]:
    off_us, on_us = settled(off, field), settled(on, field)
    return [
        Result(f"{name}_change_percent", 100 * (on_us / off_us - 1), "%", "< 0", "agent off", on_us / off_us),
        Result(f"{name}_us_agent_off", off_us, "us"),
        Result(f"{name}_us_agent_on", on_us, "us"),
    ]


def step_times_us(run: dict[str, Any]) -> NDArray[np.float64]:
    return np.array([step["duration_us"] for step in run["steps"]])


def settled(run: dict[str, Any], field: str) -> float:
    """The median of `field` over the last quarter of the steps."""
    values = [step[field] for step in run["steps"]]
    return float(np.median(values[-max(1, len(values) // 4) :]))


def draw(off_us: NDArray[np.float64], on_us: NDArray[np.float64], path: Path) -> None:
    figure, (axes,) = new_figure(2.4)
    for us, colour, label, offset in ((off_us, BEFORE, "NCCL's own choices", 8), (on_us, AFTER, "zerotune", -16)):
        middle_ms = float(np.median(us[-max(1, len(us) // 4) :])) / 1e3
        axes.plot(np.arange(1, len(us) + 1), us / 1e3, color=colour, linewidth=1.1)
        change = "" if us is off_us else f" ({100 * (middle_ms * 1e3 / np.median(off_us) - 1):+.0f} %)"
        axes.annotate(
            f"{label}: {middle_ms:.2f} ms{change}", (len(us), middle_ms), (0, offset),
            textcoords="offset points", ha="right", color=colour, fontweight="bold",
        )  # fmt: skip
    axes.set_ylim(0, 1.15 * max(off_us.max(), on_us.max()) / 1e3)
    axes.set_xlim(0, len(off_us) + 1)
    axes.set_xlabel("training step")
    axes.set_ylabel("ms per step")
    axes.set_title("Step time of the demo, on an emulated NCCL's virtual clock", loc="left", color=INK, fontsize=10)
    save(figure, path)


if __name__ == "__main__":
    main()
