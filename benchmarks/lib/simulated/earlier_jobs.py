"""What earlier jobs left of some settings: by that, a simulated job begins with them instead of waiting for them."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.lib.simulated.brain_world import Call, World
from zerotune.store.records import (
    BASELINE,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    size_class,
)
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.cost_prior import CostPrior

Gains = Mapping[tuple[Call, Candidate], float]
"""By call and setting, the share of the time of NCCL's own choice that it saves."""


def key_of(world: World, call: Call) -> DecisionKey:
    """The key under which a job's brain knows a call."""
    return DecisionKey(world.communicator, call.collective, call.phase, size_class(call.message_bytes))


def lines(world: World, gains: Gains, count: int = 100, doubt: float = 0.0) -> list[CandidateStatistics]:
    """Statistics in which settings take that much less time than NCCL's own choice takes here.

    Args:
        world: the job to come.
        gains: of the settings.
        count: calls of each that were measured.
        doubt: share of each gain by which it may be off.

    Returns:
        A line for each setting, and for NCCL's own choice at each call.
    """
    found = []
    for call in dict.fromkeys(call for call, _ in gains):
        usual_us = world.truth(call, BASELINE)[0]
        ours = {candidate: gain for (one, candidate), gain in gains.items() if one == call}
        for candidate, gain in {BASELINE: 0.0, **ours}.items():
            us, std_us = (1.0 - gain) * usual_us, 0.02 * usual_us
            of_calls = count, us, us, std_us, us, 0.0, doubt * abs(gain)
            found.append(CandidateStatistics(key_of(world, call), candidate, candidate.is_baseline, *of_calls))
    return found


def knowledge(world: World, *, proven: Gains = {}, provisional: Gains = {}, promising: Gains = {}) -> Knowledge:  # noqa: B006
    """What a job's brain begins with.

    Args:
        world: the job to come.
        proven: gains that are beyond doubt: these settings run from the first plan on, and become
            incumbents once they are verified.
        provisional: settings that are probably faster: they run from the beginning.
        promising: settings of which so little is known that they are tried first.

    Returns:
        The knowledge.
    """
    known = [*lines(world, proven), *lines(world, promising, count=3)]
    unsure = lines(world, provisional, doubt=0.5)
    return Knowledge(known, by_job=[[*lines(world, proven), *unsure]])


class OnlyThese(CostPrior):
    """NCCL's costs where it offers some settings only."""

    def __init__(self, facts: Mapping[str, str | int | float | bool], *settings: Candidate) -> None:
        super().__init__(facts)
        self._settings = settings

    def candidates(self, communicator: CommunicatorClass, collective: Collective) -> tuple[Candidate, ...]:
        """NCCL's own choice, and those of the settings that are possible."""
        possible = super().candidates(communicator, collective)
        return (BASELINE, *(one for one in possible if one in self._settings))

    def change(self, *settings: Candidate) -> None:
        """Offer these from now on."""
        self._settings = settings
        self.revision += 1


def offer_only(world: World, brain: Brain, *settings: Candidate) -> OnlyThese:
    """Let a brain that has seen nothing yet choose among some settings only.

    Args:
        world: its job.
        brain: to be told.
        settings: beside NCCL's own choice, in all collectives for which they are possible.

    Returns:
        What is offered, to be changed later.
    """
    offers = OnlyThese({**world.fabric.describe(), "emulated": world.fabric_name}, *settings)
    brain.restrict(offers)
    return offers
