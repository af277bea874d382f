"""What the store remembers of a training's starts is what the policy is told, and what people are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.command_line import zerotune
from zerotune.store.records import StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner.call_effects import CallEffect, write_effects
from zerotune.tuner.environment.candidates import Candidate
from zerotune.tuner.environment.history import History, history, training_id
from zerotune.tuner.environment.proposal import candidates, propose
from zerotune.tuner.environment.trials import Outcome
from zerotune.tuner.offline.jobs.listing import JobEnd, end_of

HARDWARE = {"gpu": "H100", "adapters": "8 x InfiniBand 400 Gb/sec", "nccl_version": 22809, "n_nodes": 2}
COMMAND = ["torchrun", "train.py"]
TRAINING = training_id(COMMAND, None)


class Starts:
    """Writes one start after another into a store, as a daemon would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._n = 0

    def add(self, variables: str = "", *, step_us: float = 1e5, n_steps: int = 40, **news: object) -> str:
        """A job of so many steps; 0: no rank ever greeted."""
        self._n += 1
        job_id = f"job-{self._n}"
        with Store.open(self.path) as store:
            store.record_start(job_id, "", str(news.pop("training", TRAINING)), variables)
            facts = HARDWARE | dict(one.split("=") for one in variables.split())
            if n_steps:
                hardware = {**facts, **news.pop("hardware", {})}  # type: ignore[dict-item] - news are of any kind
                store.record_job(job_id, f"fabric{sorted(hardware.items())}", hardware, 16)
                store.record_steps(job_id, [StepRecord(at, 0, step_us * (1 + at % 3 / 1000)) for at in range(n_steps)])
            store.update_job(job_id, **({"ended_at_s": 1.0} | news))  # type: ignore[arg-type] - as above
        return job_id


@pytest.fixture
def starts(tmp_path: Path) -> Starts:
    return Starts(tmp_path / "store.db")


def outcomes(starts: Starts) -> list[Outcome]:
    with Store.open(starts.path, read_only=True) as store:
        return [one.outcome for one in history(store, TRAINING).jobs]


def test_starts_are_told_with_their_variables_and_times(starts: Starts) -> None:
    starts.add()
    starts.add("NCCL_BUFFSIZE=8388608", step_us=9e4)
    starts.add(training="another training")
    with Store.open(starts.path, read_only=True) as store:
        found = history(store, TRAINING)
    assert [one.change for one in found.jobs] == ["", "NCCL_BUFFSIZE=8388608"]
    assert [one.step_us for one in found.jobs] == pytest.approx([1e5, 9e4], rel=0.01)
    assert found.is_multi_node
    assert found.hardware["adapters"] == HARDWARE["adapters"]
    assert not any(name.startswith("NCCL") for name in found.hardware)


def test_another_machine_begins_anew(starts: Starts) -> None:
    starts.add()
    starts.add("NCCL_BUFFSIZE=8388608")
    last = starts.add(hardware={"gpu": "B200"})
    with Store.open(starts.path, read_only=True) as store:
        assert history(store, TRAINING).job_ids == [last]


def test_starts_with_a_variable_of_the_user_are_compared_with_each_other_only(starts: Starts) -> None:
    starts.add()
    starts.add("NCCL_BUFFSIZE=8388608", step_us=9e4)
    own = starts.add(step_us=9e4, hardware={"NCCL_BUFFSIZE": "8388608"})
    with Store.open(starts.path, read_only=True) as store:
        assert history(store, TRAINING).job_ids == [own]


@pytest.mark.parametrize(
    ("news", "outcome"),
    [
        ({}, Outcome.ended),
        ({"n_steps": 0, "ended_at_s": None}, Outcome.failed),
        ({"n_steps": 3}, Outcome.ended),
        ({"n_steps": 3, "is_lost": True}, Outcome.failed),
        ({"n_steps": 3, "ended_at_s": None}, Outcome.failed),
        ({"n_steps": 30, "ended_at_s": None}, Outcome.ended),
        ({"failure": "rank 3: DistBackendError"}, Outcome.failed),
        ({"failure": "rank 0: KeyboardInterrupt"}, Outcome.ended),
        ({"n_steps": 15, "is_lost": True}, Outcome.failed),
        ({"n_steps": 35, "is_lost": True}, Outcome.ended),
    ],
)
def test_a_start_that_came_to_nothing_failed_unless_the_user_wished_so(starts: Starts, news, outcome) -> None:
    starts.add()
    starts.add("NCCL_NTHREADS=64", **news)
    starts.add()
    assert outcomes(starts) == [Outcome.ended, outcome, Outcome.ended]


def test_the_newest_start_may_still_run(starts: Starts) -> None:
    starts.add()
    starts.add("NCCL_NTHREADS=64", n_steps=3, ended_at_s=None)
    assert outcomes(starts)[-1] is Outcome.unknown
    assert propose(starts.path, COMMAND, None, None, {}).variables == "", "and nothing is tried meanwhile"


def test_the_first_start_runs_as_ever_and_what_the_user_set_is_left_alone(starts: Starts) -> None:
    first = propose(starts.path, COMMAND, None, None, {})
    assert (first.training, first.variables) == (TRAINING, "")
    starts.add()
    own = [Candidate("NCCL_BUFFSIZE", "8388608"), Candidate("NCCL_NTHREADS", "256")]
    assert propose(starts.path, COMMAND, None, own, {}).variables == "NCCL_BUFFSIZE=8388608"
    assert propose(starts.path, COMMAND, None, own, {"NCCL_BUFFSIZE": "1"}).variables == "NCCL_NTHREADS=256"
    starts.add("NCCL_BUFFSIZE=8388608", n_steps=0, ended_at_s=None)
    starts.add()
    assert propose(starts.path, COMMAND, None, own, {}).variables == "NCCL_NTHREADS=256", "a failure is not repeated"


def test_a_variable_of_the_network_plugin_that_the_user_set_stays(starts: Starts) -> None:
    starts.add()
    own = [Candidate("FI_CXI_RDZV_PROTO", "alt_read"), Candidate("NCCL_NTHREADS", "256")]
    assert propose(starts.path, COMMAND, None, own, {}).variables == "FI_CXI_RDZV_PROTO=alt_read"
    assert propose(starts.path, COMMAND, None, own, {"FI_CXI_RDZV_PROTO": "default"}).variables == "NCCL_NTHREADS=256"


def test_a_variable_that_helped_other_nodes_comes_first(starts: Starts) -> None:
    starts.add()
    hardware = {name: value for name, value in HARDWARE.items() if name != "n_nodes"}
    offered = candidates(known(starts), {})
    usual_first, last = offered[0], offered[-1]
    write_effects(starts.path, [CallEffect(hardware, str(last).lower(), -0.2, 0.05, 3)])
    assert propose(starts.path, COMMAND, None, None, {}).variables == str(last)
    write_effects(starts.path, [CallEffect(hardware | {"gpu": "B200"}, str(last).lower(), -0.2, 0.05, 3)])
    assert propose(starts.path, COMMAND, None, None, {}).variables == str(usual_first)


def known(starts: Starts) -> History:
    with Store.open(starts.path, read_only=True) as store:
        return history(store, TRAINING)


def test_a_start_of_which_nothing_was_heard_is_silent(starts: Starts) -> None:
    with Store.open(starts.path) as store:
        store.record_start("job-x", "", TRAINING, "NCCL_NTHREADS=64")
        store.flush()
        assert [end_of(one, is_written=True) for one in store.jobs()] == [JobEnd.silent]


def test_only_steps_of_nccls_own_choice_compare_starts(starts: Starts) -> None:
    """What zerotune tunes makes steps shorter from start to start, whatever the variables are."""
    with Store.open(starts.path) as store:
        for job, n_own in (("much", 12), ("little", 11)):
            store.record_start(job, "", TRAINING, "")
            store.record_job(job, "fabric", HARDWARE, 16)
            took_us = [9e5] * 4 + [1e5] * (n_own - 4) + [5e4] * 40
            steps = [StepRecord(at, int(at >= n_own), us) for at, us in enumerate(took_us)]
            store.record_steps(job, steps)
        store.flush()
        assert [one.step_us for one in history(store, TRAINING).jobs] == [pytest.approx(1e5), None]


def test_a_name_stands_for_all_of_its_commands() -> None:
    assert training_id(COMMAND, "llama") == training_id(["bash", "run.sh"], "llama") != TRAINING


def test_proven_variables_are_shown_and_exported(starts: Starts, tmp_path: Path) -> None:
    store = ("--store", str(starts.path))
    starts.add(training="")
    none = zerotune("explain", "--environment", *store)
    assert none.code == 2
    assert "--tune-environment" in none.err
    for _ in range(6):
        starts.add()
        starts.add("NCCL_BUFFSIZE=8388608", step_us=7e4)
    starts.add("NCCL_NTHREADS=64", n_steps=0, ended_at_s=None)
    starts.add()
    shown = zerotune("explain", "--environment", *store).out
    assert "kept: NCCL_BUFFSIZE=8388608" in shown
    assert "NCCL_NTHREADS=64" in shown
    assert "failed" in shown
    written = zerotune("store", "export", str(tmp_path / "x.env"), "--to", "environment", *store)
    assert written.code == 0, written.err
    assert "NCCL_BUFFSIZE=8388608" in (tmp_path / "x.env").read_text().splitlines()
