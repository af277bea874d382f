"""What shows in step time alone is found out while it is on trial or leads; what slows nothing down is left alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import ALONE, NINE, make_brain, play, secretly_slow_job
from zerotune.tuner.learning.policy.step_effects import HORIZON_STEPS
from zerotune.tuner.learning.policy.step_guard import Slow, StepGuard


@pytest.mark.parametrize(("slow", "most_steps", "most_lost"), [(0.5, 20, 0.01), (0.1, 25, 0.003), (0.03, 150, 0.004)])
def test_a_lead_that_slows_steps_down_is_withdrawn(
    slow: float, most_steps: int, most_lost: float
) -> None:
    world = secretly_slow_job(ALONE, slow, 10)
    brain = make_brain(world)
    play(world, brain, 800)
    kinds = [decision.kind for decision in brain.decisions()]
    assert "promote" not in kinds
    assert kinds.count("rollback") >= sum(state.n_withdrawn for state in brain.keys) >= 1
    assert world.n_slow <= most_steps
    assert world.lost / 800 <= most_lost
    assert 0.3 * world.lost <= brain.spent_percent / 100.0 * 800 <= 3.0 * world.lost + 1.0, "and it is charged"


@pytest.mark.slow
def test_several_keys_that_each_add_a_little_are_caught_together() -> None:
    world = secretly_slow_job(NINE, 0.1, 10)
    brain = make_brain(world)
    play(world, brain, 500)
    assert world.lost / 500 <= 0.012
    withdrawn = Counter(decision.step for decision in brain.decisions() if decision.kind == "rollback")
    assert max(withdrawn.values()) >= 2


@pytest.mark.slow
def test_a_key_that_slowed_steps_down_rests_for_longer_each_time() -> None:
    world = secretly_slow_job(ALONE, 0.1, 12)
    brain = make_brain(world)
    rests: list[int] = []
    for _ in range(600):
        play(world, brain, 1)
        state = brain.keys[0]
        if state.n_withdrawn > len(rests):
            rests.append(state.rests_until_step - world.step)
            assert state.provisional is None
            assert state.trial is None
    assert len(rests) >= 2
    assert all(180 < 100 * later / earlier < 220 for earlier, later in itertools.pairwise(rests))


def test_steps_that_are_not_slower_withdraw_nothing() -> None:
    world = secretly_slow_job(NINE, 0.0, 13)
    brain = make_brain(world)
    play(world, brain, 300)
    assert not any(state.n_withdrawn for state in brain.keys)


# ---- the guard alone, over many seeds --------------------------------------------------------------------


def _steps(kind: str, noise: float, rng: np.random.Generator, n: int) -> np.ndarray:
    steps = 9.0 + rng.normal(0.0, noise, n)
    if kind == "stragglers":
        steps += 0.4 * (rng.random(n) < 0.02)
    elif kind == "drift":
        steps += 0.0003 * np.arange(n)
    elif kind == "weather":
        load = np.zeros(n)
        for at in range(1, n):
            load[at] = 0.95 * load[at - 1] + rng.normal(0.0, noise)
        steps += load
    elif kind == "pace":
        steps += 0.1 * (np.arange(n) >= n // 2)
    return steps


def _may_run(guard: StepGuard, key: int) -> bool:
    """Whether a key may show what it tries in the next step."""
    return guard.forced.get(key, key) is not None


def _watched(n_keys: int, steps: np.ndarray, slow: Callable[[int], float], rng: np.random.Generator) -> list[Slow]:
    """Keys begin to lead after 20 steps, each with a turn of its incumbent now and then."""
    guard, found = StepGuard(), []
    for at, log_us in enumerate(steps.tolist()):
        runs = {key: key for key in range(n_keys) if at >= 20 + 3 * key and rng.random() < 0.9}
        runs = {name: key for name, key in runs.items() if _may_run(guard, key)}
        slow_now = guard.step(log_us + sum(slow(name) for name in runs), runs)
        if slow_now is not None:
            found.append(slow_now)
    return found


@pytest.mark.parametrize("kind", ["noise", "stragglers", "drift", "weather", "pace"])
@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_false_alarms_are_rare_whatever_steps_do_by_themselves(kind: str, noise: float) -> None:
    n_false = 0
    for seed in range(15):
        rng = np.random.default_rng(seed)
        n_keys = 1 + seed % 5
        n_false += len(_watched(n_keys, _steps(kind, noise, rng, 250), lambda name: 0.0, rng))
    assert n_false <= 3, "over 60 seeds of every kind it is one in fourteen"


def test_stragglers_are_no_other_pace() -> None:
    guard, rng = StepGuard(), np.random.default_rng(2)
    slow = {40, 41, 60, 90, 91, 120}
    for at in range(160):
        log_us = 10.0 + 0.4 * (at in slow) + rng.normal(0.0, 0.004)
        assert guard.detect_level_shift(log_us, {}) is None
        assert guard.step(log_us, {}) is None


def test_a_pause_that_does_not_come_about_is_given_up() -> None:
    """Else nothing would be tried any more where plans do not reach the ranks."""
    guard, rng = StepGuard(), np.random.default_rng(3)
    for _ in range(20):
        guard.step(10.0 + rng.normal(0.0, 0.004), {})
    n_asking = 0
    for at in range(20, 400):
        guard.step(10.05 + rng.normal(0.0, 0.004) if at % 2 else 10.0, {3: 0} if at % 2 else {})
        if guard.suspects:
            break
    assert guard.suspects
    while guard.suspects and n_asking < 500:
        n_asking += guard.step(10.0, {3: 0}) is None
    assert not guard.suspects
    assert n_asking <= 2 * HORIZON_STEPS


@pytest.mark.parametrize("gain", [0.05, 0.1, 0.2])
def test_a_setting_that_saves_less_than_the_last_is_no_suspect(gain: float) -> None:
    """A job begins with what earlier jobs proved; most of that pauses for the first time as another setting begins."""
    saves = {1: gain, 2: gain, 3: 0.01, 4: gain}
    for seed in range(20):
        guard, rng = StepGuard(), np.random.default_rng(seed)
        for at, runs in enumerate([[1, 2, 4]] * 4 + [[1, 2]] * 2 + [[3, 4]] * 3 + [[1, 2], [1, 2, 3]] * 5):
            log_us = 10.0 - sum(saves[name] for name in runs) + rng.normal(0.0, 0.01) + 0.05 * (at == 0)
            guard.detect_level_shift(log_us, {name: name for name in runs})
            assert guard.step(log_us, {name: name for name in runs}) is None
            assert not guard.suspects


def test_settings_that_slow_steps_down_one_after_another_are_no_other_pace() -> None:
    guard, rng = StepGuard(), np.random.default_rng(2)
    for at in range(80):
        runs = {at: 0} if 40 <= at < 46 and _may_run(guard, 0) else {}
        log_us = 10.0 + 0.3 * len(runs) + rng.normal(0.0, 0.004)
        assert guard.detect_level_shift(log_us, runs) is None
        guard.step(log_us, runs)
