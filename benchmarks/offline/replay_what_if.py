"""How truly replay answers what-ifs: other stage, ranks and buckets, against jobs that really are so.

    python -m benchmarks replay_what_if [--json] [--fabric NAME]...

On each emulated fabric six jobs are logged: DDP, ZeRO-2 and ZeRO-3 on two ranks, ZeRO-3 on four, ZeRO-2 with small
buckets, and ZeRO-3 under a plan, as a job that is tuned while it is logged. Each trace is asked what another of the
jobs would take under NCCL's own choice; that job's own step time is the truth. The store is empty: sizes that a
trace did not measure are priced by NCCL's cost model. The doubts were chosen on ethernet_boxes, h100_ib_2 and
rtx5090_loopback; the other fabrics are the test.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.lib.argument_types import a_fabric
from benchmarks.lib.reporting import Result, report
from benchmarks.offline.replay_check import N_STEPS, World, zerotune
from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.plan_file import PlanFile, write_plan
from zerotune.store.records import Algorithm, Candidate, Plan, PlanRow, Protocol
from zerotune.tuner.offline.replay import JobChange, load_table, replay_table

SMALL_BUCKET_KB = 512
TUNED = Candidate(Algorithm.ring, Protocol.ll, 2)
WARM_UP_STEPS = 2


class Question(NamedTuple):
    """`change`, asked of `job`'s trace, makes it `truth`."""

    job: str
    truth: str
    change: JobChange


class Answer(NamedTuple):
    """Step times in us."""

    logged_us: float
    predicted_us: float
    low_us: float
    high_us: float
    measured_us: float

    @property
    def error_percent(self) -> float:
        """By how much the answer misses."""
        return 100 * abs(self.measured_us / self.predicted_us - 1)

    @property
    def no_change_error_percent(self) -> float:
        """What answering with the logged step would miss."""
        return 100 * abs(self.measured_us / self.logged_us - 1)

    @property
    def is_covered(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_us <= self.measured_us <= self.high_us


def jobs(fabric: str) -> dict[str, World]:
    two = World(fabric, "zero2")
    three = replace(two, kind="zero3")
    return {
        "ddp": replace(two, kind="ddp"),
        "zero2": two,
        "zero3": three,
        "zero3 on 4 ranks": replace(three, n_ranks=4),
        "zero2 in small buckets": replace(two, bucket_kb=SMALL_BUCKET_KB),
        "zero3, tuned": three,
    }


def questions(bucket_bytes: int) -> tuple[Question, ...]:
    """`bucket_bytes` are those of the job `zero2`."""
    return (
        Question("zero3", "zero3", JobChange(stage=3)),
        Question("zero3, tuned", "zero3", JobChange(stage=3)),
        Question("zero2", "zero3", JobChange(stage=3)),
        Question("zero3", "zero2", JobChange(stage=2)),
        Question("zero3, tuned", "zero2", JobChange(stage=2)),
        Question("zero2", "ddp", JobChange(stage=0)),
        Question("ddp", "zero2", JobChange(stage=2)),
        Question("ddp", "zero3", JobChange(stage=3)),
        Question("zero3", "zero3 on 4 ranks", JobChange(n_ranks=4)),
        Question("zero3 on 4 ranks", "zero3", JobChange(n_ranks=2)),
        Question("zero2", "zero2 in small buckets", JobChange(bucket_bytes=SMALL_BUCKET_KB << 10)),
        Question("zero2 in small buckets", "zero2", JobChange(bucket_bytes=bucket_bytes)),
    )


def log(world: World, place: Path, *options: object) -> float:
    """Train with `--log-trace`.

    Args:
        world: what to train, on which fabric.
        place: folder for the run's files.
        options: further ones of `launch`.

    Returns:
        Median microseconds of the steps after warm-up.
    """
    place.mkdir(exist_ok=True)
    summary = place / "summary.json"
    zerotune(
        place, "launch", "--fabric", world.fabric, "--endpoint", f"ipc://{place}/no-daemon", "--summary", summary,
        "--log-trace", place / "trace", *options, "--", sys.executable, *world.script(N_STEPS),
    )  # fmt: skip
    steps = json.loads(summary.read_text())["steps"]
    return float(median(step["duration_us"] for step in steps[WARM_UP_STEPS:]))


def plan_for(trace: Path, path: Path) -> Path:
    """Another setting than NCCL's for whatever the trace moves."""
    rows = [
        PlanRow(shape.communicator, shape.collective, shape.phase, shape.message_bytes, shape.message_bytes, TUNED)
        for shape in load_table(trace).shapes()[0]
        if shape.message_bytes > 64
    ]
    write_plan(path, PlanFile(Plan(epoch=1, rows=tuple(rows))))
    return path


def answers(fabric: str, folder: Path) -> dict[Question, Answer]:
    """Log every job, then ask. A trace that refuses an answer ends the benchmark."""
    measured_us: dict[str, float] = {}
    places = {name: folder / name.replace(" ", "_").replace(",", "") for name in jobs(fabric)}
    for name, world in jobs(fabric).items():
        tuned = "tuned" in name
        options = ("--plan", plan_for(places["zero3"] / "trace", folder / "plan.json")) if tuned else ()
        measured_us[name] = log(world, places[name], *options)
    tables = {name: load_table(place / "trace") for name, place in places.items()}
    gradients = [shape for shape in tables["zero2"].shapes()[0] if shape.phase.name == "gradient_scatter"]
    found = {}
    for question in questions(max(shape.message_bytes for shape in gradients)):
        result = replay_table(tables[question.job], ["baseline"], change=question.change)
        assert result.what_if is not None
        if not result.what_if.step_estimates:
            raise SystemExit(f"{fabric}: {question} is refused: {result.what_if.step_refusals}")
        one = result.what_if.step_estimates[0]
        answer = Answer(
            result.what_if.logged_step_us, one.step_us, one.low_us, one.high_us, measured_us[question.truth]
        )
        found[question] = answer
        print(
            f"{fabric}, {question.job} -> {question.truth} ({question.change}): logged {answer.logged_us:,.0f} us,"
            f" predicted {answer.predicted_us:,.0f} ({answer.low_us:,.0f}..{answer.high_us:,.0f}), measured"
            f" {answer.measured_us:,.0f}, error {answer.error_percent:.1f} %{'' if answer.is_covered else ', MISSED'}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end in one line of JSON")
    parser.add_argument(
        "--fabric", action="append", type=a_fabric, help="several times; all that are shipped by default"
    )
    arguments = parser.parse_args()
    found: list[Answer] = []
    for fabric in arguments.fabric or fabrics.names():
        with tempfile.TemporaryDirectory() as folder:
            found += answers(fabric, Path(folder)).values()
    errors = [one.error_percent for one in found]
    unchanged = median(one.no_change_error_percent for one in found)
    report(
        "replay_what_if",
        [
            Result("error_percent_median", median(errors), "%", "", "no change", median(errors) / unchanged),
            Result("error_percent_worst", max(errors), "%"),
            Result(
                "answers_within_interval",
                sum(one.is_covered for one in found),
                f"of {len(found)}",
                f">= {math.ceil(0.95 * len(found))}",
            ),
        ],
        as_json=arguments.json,
    )


if __name__ == "__main__":
    main()
