"""Training has periods of its own: a sync, a log or a second optimizer every few steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.lib.brain_world import Call, World, gain_share, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Candidate, Collective, Phase, StepRecord
from zerotune.tuner.learning.policy.steps.step_trial import MAX_UNITS, StepTrials, Variant

VARIANT = Variant("at most 8 channels", {0: Candidate()}, 8)


@dataclass
class Periodic(World):
    """Every so many steps' computation takes longer."""

    period: int = 4
    longer: float = 0.3

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        usual_us = self.compute_us
        self.compute_us *= 1.0 + self.longer * (self.step % self.period == self.period - 1)
        block, record = super().run_step()
        self.compute_us = usual_us
        return block, record


@pytest.mark.parametrize(("place", "n_ranks", "seed"), [("few_sms_node", 8, 0), ("h100_node", 8, 1)])
def test_longer_steps_that_come_again_are_no_variants_doing(place: str, n_ranks: int, seed: int) -> None:
    calls = [
        Call(kind, phase, message_bytes)
        for message_bytes in (1 << 16, 3 << 20, 1 << 23, 5 << 24)
        for kind, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.all_gather, Phase.backward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
    ] * 2
    world = Periodic(place, fabric.load(place).communicator(range(n_ranks)), calls, seed=seed)
    world.compute_us = 2.3 * sum(world.truth(call, BASELINE)[0] for call in calls)
    brain = make_brain(world)
    play(world, brain, 400)
    baseline_us, _, ours_us = map(sum, zip(*gain_share(world, brain).values(), strict=True))
    assert any(one.kind == "variant" for one in brain.decisions())
    assert ours_us <= baseline_us


@pytest.mark.parametrize("period", [2, 3, 4, 6, 8])
def test_a_variant_that_changes_nothing_meets_every_phase_of_a_period(period: int) -> None:
    n_adopted = 0
    for seed in range(10):
        trials, rng = StepTrials(), np.random.default_rng(seed)
        trials.begin(VARIANT, seed)  # at another phase of the period each
        for step in range(seed, seed + 4 * MAX_UNITS):
            longer = 1.3 if step % period == 0 else 1.0
            _, outcome = trials.step(10_000.0 * longer * np.exp(rng.normal(0.0, 0.005)), is_on=trials.is_on)
            if outcome is not None:
                n_adopted += outcome.is_better
                break
        else:
            raise AssertionError("no verdict after twice as many steps as a trial may take")
    assert n_adopted == 0


def test_both_sides_have_as_many_steps_after_every_pair_of_windows() -> None:
    trials = StepTrials()
    trials.begin(VARIANT, 0)
    ran = []
    for _ in range(80):
        ran.append(trials.is_on)
        trials.step(10_000.0, is_on=trials.is_on)
        if trials.variant is None:
            break
    pairs = [tuple(ran[at : at + 4]) for at in range(0, 8, 4)]
    assert all(pair in {(True, True, False, False), (False, False, True, True)} for pair in pairs)
