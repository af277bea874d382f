"""Where the kind of a job cannot be recognised, the missing evidence is named: as it runs, and from the store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.records import Collective, MissingEvidence, Stage, StepRecord
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.client.status import in_words
from zerotune.tuner.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.missing import missing_after
from zerotune.tuner.offline import explaining, stage_command
from zerotune.tuner.offline.report.facts import gather

AG, RS, AR, BC = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce, Collective.broadcast
Calls = list[tuple[Collective, int]]

ONE_BUCKET: Calls = [(AR, 5 << 20)]
"""nanoGPT-like DDP: all gradients are one bucket, and nothing else is sent."""
TINY_MODEL: Calls = [(AR, 264)]
"""As Lightning's example: a model smaller than a flag may be."""
FORWARD_ONLY: Calls = [(AG, 3 << 20), (AG, 5 << 20)]
STEPS = {
    "one bucket": (ONE_BUCKET, MissingEvidence.one_size),
    "tiny model": (TINY_MODEL, MissingEvidence.only_small),
    "forward only": (FORWARD_ONLY, MissingEvidence.nothing_reduced),
    "nothing": ([], MissingEvidence.no_collectives),
}


def played(step: Calls, n_steps: int) -> StageFingerprint:
    fingerprint = StageFingerprint()
    kinds, n_bytes = np.array([kind for kind, _ in step], np.int64), np.array([size for _, size in step], np.int64)
    for number in range(n_steps):
        fingerprint.add(kinds, n_bytes, np.zeros(len(step)), number)
    return fingerprint


@pytest.mark.parametrize("name", STEPS)
def test_the_missing_evidence_is_named(name: str) -> None:
    step, missing = STEPS[name]
    fingerprint = played(step, 8)
    assert (fingerprint.stage, fingerprint.missing_evidence) == (Stage.unknown, missing)
    assert in_words(missing)


def test_calls_that_came_once_may_yet_repeat() -> None:
    fingerprint = played([(AR, (3 + n) << 16) for n in range(9)], 1)
    assert fingerprint.missing_evidence is MissingEvidence.no_repetition


@pytest.mark.parametrize(
    ("n_steps", "expected"), [(3, MissingEvidence.too_early), (20, MissingEvidence.nothing_reduced)]
)
def test_of_a_young_job_nothing_is_said_to_be_missing(n_steps: int, expected: MissingEvidence) -> None:
    assert missing_after(n_steps, played(FORWARD_ONLY, 8).missing_evidence) is expected
    assert missing_after(n_steps, MissingEvidence.nothing) is MissingEvidence.nothing


def test_nothing_is_missing_where_a_stage_is_shown() -> None:
    step = [*[(AG, 1 << 20)] * 4, *[(AG, 1 << 20), (RS, 1 << 20)] * 4, (AG, 9 << 20), (RS, 9 << 20), (AR, 4)]
    fingerprint = played(step, 8)
    assert fingerprint.stage is not Stage.unknown
    assert fingerprint.missing_evidence is MissingEvidence.nothing
    assert in_words(MissingEvidence.nothing) == ""


@pytest.mark.parametrize("name", STEPS)
def test_the_store_tells_it_of_a_job_that_is_over(name: str, tmp_path: Path) -> None:
    """With the broadcasts before the first step, which are of no step."""
    step, missing = STEPS[name]
    calls = [(BC, (1 + n) << 16) for n in range(2)] * bool(step) + step * 40
    block = np.zeros(len(calls), MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["duration_us"], block["is_default"] = 2, 1, 50.0, True
    block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 1
    block["collective"], block["message_bytes"] = [kind for kind, _ in calls], [size for _, size in calls]
    path = tmp_path / "s.db"
    with Store.open(path) as store:
        store.record_job("job", "fabric", {}, 2)
        store.record_steps("job", [StepRecord(number, 0, 1000.0) for number in range(40)])
        store.record_measurements("fabric", "job", block)
        store.flush()
    assert gather(path).missing_evidence is missing
    head = explaining.head_of(path, "job")
    assert (head.stage, head.missing_evidence) == ("unknown", missing)
    with Store.open(path) as store:
        store.update_job("job", stage=Stage.zero2)
        store.flush()
    assert gather(path).missing_evidence is MissingEvidence.nothing


@pytest.mark.parametrize(("n_gathers", "is_known"), [(2, False), (0, True)])
def test_a_trace_without_the_sizes_of_some_collectives_shows_no_stage(
    tmp_path: Path, n_gathers: int, is_known: bool
) -> None:
    kernel = {"ph": "X", "cat": "kernel", "dur": 9}
    told = {"Collective name": "allreduce", "Group size": 4, "dtype": "Float"}
    events = []
    for step in range(12):
        for at, n_elements in enumerate((900_000, 700_000, 400_000)):
            args = {**told, "In msg nelems": n_elements, "Out msg nelems": n_elements}
            events.append({**kernel, "name": "ncclDevKernel_AllReduce", "ts": 1000 * step + 10 * at, "args": args})
        for at in range(n_gathers):  # what makes it ZeRO-1
            events.append({**kernel, "name": "ncclDevKernel_AllGather", "ts": 1000 * step + 500 + at, "args": {}})
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    reading = stage_command.read(path)
    assert reading.n_unsized == 12 * n_gathers
    assert (reading.shown.stage is Stage.ddp) == is_known
    assert (reading.missing_evidence is MissingEvidence.incomplete) != is_known
