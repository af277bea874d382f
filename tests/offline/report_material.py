"""A made-up job in a real store: what the report's tests and a look at the page need."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    Protocol,
    Stage,
    StepRecord,
    TimingSource,
    size_class,
)
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.offline.report import gather, write_page

FABRIC = "ethernet_boxes"
N_STEPS = 200
PLACES = [
    (Collective.all_gather, Phase.forward_gather),
    (Collective.all_gather, Phase.backward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
]
SIZES = [16 << 10, 256 << 10, 3 << 20]
FAST = Candidate(Algorithm.ring, Protocol.ll, 8)
SLOW = Candidate(Algorithm.ring, Protocol.simple, 8)


def make_store(
    path: Path,
    job_id: str = "job-1",
    *,
    reason: str = "measured 21.3 % faster than baseline",
    n_untuned: int = 20,
    sizes: list[int] = SIZES,
) -> Path:
    chance = np.random.default_rng(3)
    described = fabrics.load(FABRIC)
    with Store.open(path) as store:
        store.record_job(job_id, described.fabric_id, described.describe(), 2)
        steps = []
        for step in range(N_STEPS):
            epoch = 0 if step < n_untuned else min(1 + (step - n_untuned) // 20, 6)
            base_us = 30_000 - 1500 * epoch
            duration_us = base_us * chance.lognormal(0, 0.03)
            steps.append(StepRecord(step, epoch, duration_us, 0.3 * duration_us, 0.42 + 0.001 * epoch))
        store.record_steps(job_id, steps)
        store.record_measurements(described.fabric_id, job_id, _measurements(chance, sizes))
        store.record_decisions(_decisions(job_id, described.fabric_id, reason))
        store.update_job(job_id, stage=Stage.zero3)
        store.flush()
    return path


def control_windows(path: Path, job_id: str, own_us: Callable[[StepRecord], float], *, first: int = 30) -> Path:
    """Give a recorded job control windows: every twelfth and thirteenth step, from `first` on, takes `own_us`."""
    with Store.open(path) as store:
        fabric_id = next(job.fabric_id for job in store.jobs() if job.job_id == job_id)
        steps = [step for step in store.steps(job_id) if step.step >= first and step.epoch]
        key = DecisionKey(CommunicatorClass(2, 2), Collective.all_gather, Phase.forward_gather, size_class(16 << 10))
        for step in steps:
            window, place = divmod(step.step, 12)
            if place < 2:
                us, epoch = own_us(step), 1000 + window
                store.record_steps(job_id, [StepRecord(step.step, epoch, us, 0.3 * us)])
                store.record_decisions([Decision(job_id, fabric_id, key, BASELINE, epoch, "control", "a window")])
        store.flush()
    return path


def _measurements(chance: np.random.Generator, sizes: list[int]) -> np.ndarray:
    rows = []
    for step in range(N_STEPS):
        for collective, phase in PLACES:
            for message_bytes in sizes:
                candidate = FAST if step > 60 and message_bytes < 1 << 20 else SLOW
                us = message_bytes / 1e3 * (0.7 if candidate is FAST else 1.0) * chance.lognormal(0, 0.05)
                row = np.zeros((), MEASUREMENT)
                row["n_ranks"], row["n_nodes"], row["message_bytes"], row["duration_us"] = 2, 2, message_bytes, us
                row["step"], row["memory_pressure"] = step, math.nan
                row["collective"], row["phase"] = collective, phase
                row["algorithm"], row["protocol"], row["n_channels"] = 1, candidate.protocol, 8
                row["is_default"], row["timing_source"] = candidate is SLOW, TimingSource.emulated
                rows.append(row)
    return np.array(rows, MEASUREMENT)


def _decisions(job_id: str, fabric_id: str, reason: str) -> list[Decision]:
    decisions = []
    for index, (collective, phase) in enumerate(PLACES):
        for message_bytes in SIZES:
            key = DecisionKey(CommunicatorClass(2, 2), collective, phase, size_class(message_bytes))
            is_small = message_bytes < 1 << 20
            base_us = message_bytes / 1e3
            common = {"job_id": job_id, "fabric_id": fabric_id, "key": key, "baseline_us": base_us}
            if is_small:
                decisions.append(
                    Decision(**common, candidate=FAST, epoch=1 + index, kind="explore", reason="expected gain")
                )
            kind, candidate = ("promote", FAST) if is_small else ("keep", BASELINE)
            alternatives = [
                _alternative(BASELINE, base_us, n_measurements=40, measured_us=base_us),
                _alternative(FAST, 0.7 * base_us, n_measurements=0, measured_us=None),
            ]
            decisions.append(
                Decision(
                    **common,
                    candidate=candidate,
                    epoch=3 + index,
                    kind=kind,
                    reason=reason,
                    predicted_us=(0.7 if is_small else 1.0) * base_us,
                    predicted_low_us=0.65 * base_us,
                    predicted_high_us=1.05 * base_us,
                    n_measurements=41,
                    alternatives=json.dumps(alternatives),
                )
            )
    return decisions


def _alternative(
    candidate: Candidate, predicted_us: float, *, n_measurements: int, measured_us: float | None
) -> dict[str, object]:
    return {
        "candidate": str(candidate),
        "predicted_us": predicted_us,
        "predicted_low_us": 0.9 * predicted_us,
        "predicted_high_us": 1.1 * predicted_us,
        "is_guess": False,
        "measured_us": measured_us,
        "n_measurements": n_measurements,
        "spent_us": 0.0,
        "note": "",
    }


def report_of(store_path: Path, folder: Path, summaries: Sequence[Path] = ()) -> str:
    """The page about the newest job that trained."""
    write_page(gather(store_path, None, summaries), folder / "report.html")
    return (folder / "report.html").read_text()


def make_summaries(directory: Path, *, gain: float = 0.2) -> list[Path]:
    chance = np.random.default_rng(4)
    paths = []
    for label, factor in (("agent off", 1.0), ("agent on", 1 - gain)):
        steps = [
            {
                "step": step,
                "duration_us": 30_000 * (1 - (1 - factor) * min(1, step / 60)) * chance.lognormal(0, 0.03),
                "exposed_us": 9_000 * (1 - (1 - factor) * min(1, step / 60)) * chance.lognormal(0, 0.05),
                "loss_hex": (5.0 - step / 100).hex(),
            }
            for step in range(N_STEPS)
        ]
        document = {"label": label, "emulated": True, "fabric": FABRIC, "steps": steps, "n_disagreements": 0}
        path = directory / f"{label.replace(' ', '_')}.json"
        path.write_text(json.dumps(document))
        paths.append(path)
    return paths
