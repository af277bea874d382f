"""Measurements replace assumptions: what a store says of collectives, of steps and of memory."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from zerotune.store.errors import UserError
from zerotune.store.records import Collective, CommunicatorClass, Source, StepRecord
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.advice.constants import DEFAULT
from zerotune.tuner.advice.hardware.clusters import cluster
from zerotune.tuner.advice.models.model_shape import from_parameters
from zerotune.tuner.advice.prediction.memory import memory_of
from zerotune.tuner.advice.prediction.step import step_parts
from zerotune.tuner.advice.problem import Measured, Problem, Software, ZeroConfiguration
from zerotune.tuner.offline.advise.measured import measured, parse_ran

PROBLEM = Problem(
    shape=from_parameters(1e9), cluster=cluster("dgx_a100", 2, DEFAULT), software=Software(), constants=DEFAULT
)
RAN = ZeroConfiguration(stage=3, micro_batch=2)
SLOWER = 1.7


def record(path, *, collectives=True, steps=True, facts=None, slower=SLOWER, pressure=0.5):
    block = np.zeros(6, MEASUREMENT)
    block["collective"], block["n_ranks"], block["n_nodes"] = Collective.all_gather, 16, 2
    block["message_bytes"] = [1 << place for place in range(16, 22)]
    block["algorithm"], block["protocol"], block["source"] = 1, 2, Source.live
    place = CommunicatorClass(16, 2)
    block["duration_us"] = [
        slower * PROBLEM.cluster.network.time_us(Collective.all_gather, float(size), place)
        for size in block["message_bytes"]
    ]
    parts = step_parts(msgspec.structs.replace(PROBLEM, measured=Measured(1.3, SLOWER)), RAN)
    step_us, exposed_us = 1e6 * parts.total_s, 1e6 * parts.exposed_s
    with Store.open(path) as store:
        store.record_job("job", "fabric", facts or {}, 16)
        if collectives:
            store.record_measurements("fabric", "job", block)
        if steps:
            store.record_steps("job", [StepRecord(n, 0, step_us, exposed_us, pressure) for n in range(20)])
        store.flush()


def test_collectives_steps_and_memory_replace_what_was_assumed(tmp_path):
    record(tmp_path / "s.db")
    found = measured(PROBLEM, tmp_path / "s.db", None, RAN)
    assert found.problem.measured.network_factor == pytest.approx(SLOWER, rel=1e-3)
    assert found.problem.measured.compute_factor == pytest.approx(1.3, rel=0.05)
    assert len(found.sentences) == 3
    used = memory_of(found.problem, RAN).total_bytes
    assert used == pytest.approx(0.5 * PROBLEM.cluster.gpu.memory_bytes, rel=1e-6)


def test_measurements_of_another_model_are_refused(tmp_path):
    record(tmp_path / "s.db", collectives=False)
    with pytest.raises(UserError):
        measured(PROBLEM, tmp_path / "s.db", None, None)
    with pytest.raises(UserError):
        measured(PROBLEM, tmp_path / "s.db", None, ZeroConfiguration(stage=3, micro_batch=4096))


def test_measurements_of_another_machine_are_refused(tmp_path):
    record(tmp_path / "same.db", facts={"compute_capability": 80})
    assert measured(PROBLEM, tmp_path / "same.db", None, RAN).problem.measured.network_factor
    record(tmp_path / "newer.db", facts={"compute_capability": 90})
    record(tmp_path / "slower.db", slower=1000.0)
    for name in ("newer.db", "slower.db"):
        with pytest.raises(UserError):
            measured(PROBLEM, tmp_path / name, None, RAN)


def test_a_store_without_jobs_and_a_job_without_steps_are_refused(tmp_path):
    Store.open(tmp_path / "empty.db").close()
    record(tmp_path / "s.db", steps=False)
    assert measured(PROBLEM, tmp_path / "s.db", None, None).sentences
    for name, job, ran in (("empty.db", None, None), ("s.db", "other", None), ("s.db", None, RAN)):
        with pytest.raises(UserError):
            measured(PROBLEM, tmp_path / name, job, ran)


@pytest.mark.parametrize("text", ["stage=3,model-parallel=3", "stage=3,model-parallel=64", "stage=3,hybrid=5"])
def test_a_choice_that_cannot_have_run_is_refused(text, tmp_path):
    record(tmp_path / "s.db")
    with pytest.raises(UserError):
        measured(PROBLEM, tmp_path / "s.db", None, parse_ran(text))
