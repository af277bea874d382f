"""What is read of a store that a daemon writes: steps, decisions and keys, a little at a time."""

from __future__ import annotations

import numpy as np
import pytest

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
    StepRecord,
    size_class,
)
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.watching.history import KEYS_EVERY_S, MAX_DECISIONS, MAX_STEPS, History

JOBS = ["job"]
KEY = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.forward_gather, size_class(1 << 20))
RING = Candidate(Algorithm.ring, Protocol.ll, 4)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "s.db") as opened:
        opened.record_job("job", "fabric", {}, 2)
        opened.flush()
        yield opened


@pytest.fixture
def clock():
    now = [100.0]
    return now


@pytest.fixture
def history(clock):
    made = History(lambda: clock[0])
    yield made
    made.close()


def decide(store, *kinds: str) -> None:
    store.record_decisions([Decision("job", "fabric", KEY, RING, 1, kind, kind, step=3) for kind in kinds])
    store.flush()


def measure(store, candidate: Candidate, duration_us: float, *, is_default: bool = False) -> None:
    block = np.zeros(8, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"] = 2, 1, 1 << 20
    block["collective"], block["phase"] = Collective.all_gather, Phase.forward_gather
    block["algorithm"], block["protocol"], block["n_channels"] = candidate.algorithm, candidate.protocol, 4
    block["duration_us"], block["is_default"] = duration_us, is_default
    store.record_measurements("fabric", "job", block)
    store.flush()


def test_steps_are_read_once_and_the_newest_are_kept(store, history):
    store.record_steps("job", [StepRecord(n, 0, 1.0) for n in range(1, MAX_STEPS + 100)])
    store.flush()
    steps = history.of(store.path, JOBS)["job"].steps
    assert [steps[0].step, steps[-1].step, len(steps)] == [100, MAX_STEPS + 99, MAX_STEPS]
    store.record_steps("job", [StepRecord(9000, 1, 2.0)])
    store.flush()
    assert history.of(store.path, JOBS)["job"].steps[-1] == StepRecord(9000, 1, 2.0)


def test_the_newest_decisions_and_what_keys_save_by_what_was_measured(store, history, clock):
    measure(store, Candidate(Algorithm.tree, Protocol.simple, 4), 100.0, is_default=True)
    measure(store, RING, 80.0)
    store.record_steps("job", [StepRecord(4, 1, 1.0)])
    decide(store, *["explore"] * MAX_DECISIONS, "promote")
    found = history.of(store.path, JOBS)["job"]
    assert len(found.decisions) == MAX_DECISIONS
    assert found.decisions[-1].kind == "promote"
    (key,) = found.keys
    assert (key.setting, key.on_trial) == (str(RING), "")
    assert key.saved_us == pytest.approx(key.calls_per_step * (100 - 80))
    store.record_decisions([Decision("job", "fabric", KEY, BASELINE, 2, "rollback", "slow", step=5)])
    store.flush()
    assert history.of(store.path, JOBS)["job"].keys == found.keys, "medians are not taken all the time"
    clock[0] += 2 * KEYS_EVERY_S
    (key,) = history.of(store.path, JOBS)["job"].keys
    assert key.setting != str(RING)


def test_a_store_that_is_not_here_is_said_to_be_so_and_tried_again(store, history, clock, tmp_path):
    assert history.of(tmp_path / "moved.db", JOBS) == {}
    assert history.problem
    assert history.of(store.path, JOBS) == {}, "not at once"
    clock[0] += 60
    assert set(history.of(store.path, JOBS)) == {"job"}
    assert not history.problem
