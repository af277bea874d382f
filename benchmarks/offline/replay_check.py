"""Does replay predict the effect of a plan? Part of `replay_speed.py`, which prints the figures.

In each world (fabric and training script) one run is logged and a sweep measures the settings. Plans are made of the
best and of random settings. Replay predicts the step time under each plan; the script then runs under `launch --plan`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.plan_file import PlanFile, write_plan
from zerotune.store.records import BASELINE, Plan, PlanRow
from zerotune.tuner.offline.replay import load_table, replay_table
from zerotune.tuner.offline.replay.estimates import CostEstimates
from zerotune.tuner.offline.replay.evidence import evidence_of
from zerotune.tuner.offline.replay.policies import PolicyContext, oracle
from zerotune.tuner.offline.replay.result import ReplayResult
from zerotune.tuner.offline.replay.table import CollectiveTable, Shape

N_STEPS = 16
PLANS = ("best", "random 1", "random 2", "random 3")


@dataclass(frozen=True)
class World:
    """A script on a fabric."""

    fabric: str
    kind: str
    n_ranks: int
    n_layers: int
    width: int
    n_context: int
    bucket_kb: int | None
    """Of DDP's and ZeRO's buckets."""
    seed: int
    """Of the random plans."""

    def __str__(self) -> str:
        bucket = f", {self.bucket_kb} KiB buckets" if self.bucket_kb is not None else ""
        model = f"{self.n_layers} x {self.width}, context {self.n_context}"
        return f"{self.fabric} {self.kind}, {self.n_ranks} ranks, {model}{bucket}"

    def script(self, n_steps: int) -> tuple[object, ...]:
        model = {
            "n_layers": self.n_layers, "width": self.width, "n_context": self.n_context, "bucket_kb": self.bucket_kb,
        }  # fmt: skip
        return "-m", "benchmarks.offline.replay_worker", self.kind, self.n_ranks, n_steps, json.dumps(model)


KINDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def worlds(seed: int) -> tuple[World, ...]:
    """Each kind of script once, on different fabrics."""
    draw = random.Random(seed)
    return tuple(
        World(
            fabric,
            kind,
            n_ranks=draw.choice((2, 3, 4)),
            n_layers=draw.randint(2, 6),
            width=draw.choice((96, 128, 160, 192, 256)),
            n_context=draw.choice((32, 64, 96)),
            bucket_kb=draw.choice((256, 512, 1024, 2048)) if kind != "fsdp2" else None,
            seed=seed,
        )
        for fabric, kind in zip(draw.sample(fabrics.names(), len(KINDS)), KINDS, strict=True)
    )


@dataclass(frozen=True)
class Case:
    """One plan in one world; step times in us."""

    world: World
    plan: str
    baseline_us: float
    predicted_us: float
    low_us: float
    high_us: float
    measured_us: float
    first_order_us: float

    @property
    def error_percent(self) -> float:
        """The relative error of the predicted speed-up (baseline over plan)."""
        return 100 * abs(self.measured_us / self.predicted_us - 1)

    @property
    def first_order_error_percent(self) -> float:
        """`error_percent` for the estimate that keeps the exposed share of communication."""
        return 100 * abs(self.measured_us / self.first_order_us - 1)

    @property
    def change_percent(self) -> float:
        """The error of predicting no change."""
        return 100 * abs(self.measured_us / self.baseline_us - 1)

    @property
    def is_covered(self) -> bool:
        """The interval contains the measured value."""
        return self.low_us <= self.measured_us <= self.high_us


def cases(folder: Path, chosen: Sequence[World], plans: Sequence[str]) -> Iterator[Case]:
    """Log, sweep, predict and run each case. Raises CalledProcessError if a command failed."""
    for number, world in enumerate(chosen):
        place = folder / str(number)
        place.mkdir()
        run(world, place, "--log-trace", place / "trace")
        table = load_table(place / "trace")
        store = place / "store.db"
        sweep(world, table, store)
        for name in plans:
            path = place / f"{name.replace(' ', '_')}.json"
            result = predicted(table, store, name, path, world.seed)
            if not result.step_estimates:
                raise SystemExit(f"{world}: replay refuses to judge {name}: {result.step_refusals}")
            estimate, facts = result.step_estimates[0], result.steps
            assert facts is not None
            total = result.totals[0]
            share = facts.exposed_share * (total.cost_us / total.baseline_us - 1) * facts.communication_us
            yield Case(
                world, name, facts.step_us, estimate.step_us, estimate.low_us, estimate.high_us,
                run(world, place, "--plan", path), facts.step_us + share,
            )  # fmt: skip


def run(world: World, place: Path, *options: object, n_steps: int = N_STEPS) -> float:
    summary = place / "summary.json"
    zerotune(
        place, "launch", "--fabric", world.fabric, "--endpoint", f"ipc://{place}/no-daemon", "--summary", summary,
        *options, "--", sys.executable, *world.script(n_steps),
    )  # fmt: skip
    steps = json.loads(summary.read_text())["steps"]
    last_epoch = steps[-1]["epoch"]
    assert last_epoch == (1 if "--plan" in options else 0)
    settled = [step["duration_us"] for step in steps if step["epoch"] == last_epoch][1:]
    assert len(settled) >= 5, f"the plan came into force too late: {len(settled)} steps"
    return float(median(settled))


def sweep(world: World, table: CollectiveTable, store: Path) -> None:
    """Measure all settings at octaves around the sizes of the script's messages."""
    tunable = [shape for shape in table.shapes[0] if shape.message_bytes > 64]
    sizes = [shape.message_bytes for shape in tunable]
    collectives = [
        word for name in sorted({shape.collective.name for shape in tunable}) for word in ("--collective", name)
    ]
    low, high = 1 << (min(sizes).bit_length() - 1), 1 << max(sizes).bit_length()
    zerotune(
        store.parent, "sweep", "--fabric", world.fabric, "--store", store, "--full", "--n-ranks", world.n_ranks,
        "--min-bytes", low, "--max-bytes", high, "--json", *collectives,
    )  # fmt: skip


def predicted(table: CollectiveTable, store: Path, name: str, path: Path, seed: int) -> ReplayResult:
    evidence = evidence_of(store, table.fabric_id, store)
    context = PolicyContext(CostEstimates(table, evidence.statistics))
    draw = random.Random(f"{table.fabric_id} {name} {seed}")
    shapes = table.shapes[0]
    rows = [row for shape in shapes if (row := _row(context, shape, None if name == "best" else draw)) is not None]
    after_step = any(shape.phase.name == "post_step_gather" for shape in shapes)
    write_plan(path, PlanFile(Plan(epoch=1, rows=tuple(rows), gathers_after_step=after_step)))
    return replay_table(table, ["table"], evidence, plan=rows)


def _row(context: PolicyContext, shape: Shape, draw: random.Random | None) -> PlanRow | None:
    """The oracle's setting, or with `draw` any that was measured."""
    known = [one for one in context.estimates.candidates(shape) if one.algorithm is not None]
    if not known or shape.message_bytes <= 64:
        return None
    candidate = oracle(context, shape) if draw is None else draw.choice(known)
    if candidate == BASELINE:
        return None
    return PlanRow(
        shape.communicator, shape.collective, shape.phase, shape.message_bytes, shape.message_bytes, candidate
    )


def zerotune(place: Path, *words: object) -> None:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "ZEROTUNE_RUNTIME_DIR": str(place), "XDG_DATA_HOME": str(place),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "zerotune.tuner.cli", *map(str, words)],
        capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"zerotune {' '.join(map(str, words))}\n{done.stderr[-3000:]}")
