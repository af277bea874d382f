"""Durations need not have one minimum over channels: a better one far from NCCL's choice is found."""

from __future__ import annotations

import math

from benchmarks.lib.simulated.brain_world import Call, World, decided, gain_share, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Candidate, Collective, Phase

NEAR, FAR = 16, 2


class TwoPeaks(World):
    """Good at 16 channels, bad at 4 to 8, better still at 2."""

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        _, ran = super().truth(call, candidate)
        near, far = (abs(math.log2(ran.n_channels / peak)) for peak in (NEAR, FAR))
        cell = 1.0 if ran.protocol is self.setting(call, BASELINE).protocol else 1.4
        return 200.0 * cell * (1.0 + 0.2 * min(near + 0.5, far, 1.5)), ran


def test_a_second_peak_far_from_the_first_is_found() -> None:
    place = fabric.load("h100_ib_2").communicator(range(16))
    calls = [Call(Collective.all_gather, Phase.forward_gather, 1 << exponent) for exponent in (22, 23, 24)] * 2
    world = TwoPeaks("h100_ib_2", place, calls, compute_us=100_000.0)
    brain = make_brain(world)
    play(world, brain, 250)
    found = gain_share(world, brain).values()
    attainable = sum(base - best for base, best, _ in found)
    gained = sum(base - chosen for base, _, chosen in found)
    assert gained >= 0.95 * attainable > 0
    assert {decided(brain)(call).n_channels for call in calls} == {FAR}
