"""What earlier jobs left of some settings: by that, a simulated job begins with them instead of waiting for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.lib.brain_world import Call, World
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, DecisionKey, size_class
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.features import CostPrior


@dataclass
class Line:
    """One line of a store's statistics."""

    key: DecisionKey
    candidate: Candidate
    is_default: bool
    median_us: float
    count: int = 100
    std_us: float = 2.0
    level_std: float = 0.0


def key_of(world: World, call: Call) -> DecisionKey:
    """The key under which a job's brain knows a call."""
    return DecisionKey(world.communicator, call.collective, call.phase, size_class(call.message_bytes))


def lines(world: World, gains: Mapping[tuple[Call, Candidate], float], count: int = 100) -> list[Line]:
    """Statistics in which settings take so much less time than NCCL's own choice takes here.

    Args:
        world: the job to come.
        gains: by call and setting, the share of time that it saves.
        count: calls of each that were measured.

    Returns:
        A line for each setting, and for NCCL's own choice at each call.
    """
    found = []
    for call in dict.fromkeys(call for call, _ in gains):
        us = world.truth(call, BASELINE)[0]
        found.append(Line(key_of(world, call), BASELINE, True, us, count, 0.02 * us))
        ours = [(candidate, gain) for (one, candidate), gain in gains.items() if one == call]
        found += [
            Line(key_of(world, call), candidate, False, (1.0 - gain) * us, count, 0.02 * us) for candidate, gain in ours
        ]
    return found


def proven(world: World, gains: Mapping[tuple[Call, Candidate], float]) -> Knowledge:
    """Settings that are beyond doubt: they run from the first plan on, and become incumbents once they are verified.

    Args:
        world: the job to come.
        gains: as in `lines`.

    Returns:
        What its brain begins with.
    """
    known = lines(world, gains)
    return Knowledge(known, by_job=[known])


def leading(world: World, gains: Mapping[tuple[Call, Candidate], float]) -> Knowledge:
    """Settings that are probably faster: they lead from the beginning.

    Args:
        world: the job to come.
        gains: as in `lines`.

    Returns:
        What its brain begins with.
    """
    return Knowledge(by_job=[lines(world, gains)])


def promising(world: World, gains: Mapping[tuple[Call, Candidate], float]) -> Knowledge:
    """Settings of which so little is known that they are tried first.

    Args:
        world: the job to come.
        gains: as in `lines`.

    Returns:
        What its brain begins with.
    """
    return Knowledge(lines(world, gains, count=3))


class OnlyThese(CostPrior):
    """NCCL's costs where it offers some settings only."""

    def __init__(self, world: World, *settings: Candidate) -> None:
        super().__init__({**world.fabric.describe(), "emulated": world.fabric_name})
        self._settings = settings

    def candidates(self, communicator: CommunicatorClass, collective: Collective) -> tuple[Candidate, ...]:
        """NCCL's own choice, and those of the settings that are possible."""
        possible = super().candidates(communicator, collective)
        return (BASELINE, *(one for one in self._settings if one in possible))


def offer_only(world: World, brain: Brain, *settings: Candidate) -> None:
    """Let a brain that has seen nothing yet choose among some settings only.

    Args:
        world: its job.
        brain: to be told.
        settings: beside NCCL's own choice, in all collectives for which they are possible.
    """
    brain.restrict(OnlyThese(world, *settings))
