"""Start times of the generator's collectives: computation, and communication behind or beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zerotune.store.records import Collective
from zerotune.tuner.fingerprint.steps.anatomy import Ints

AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
BROADCAST, REDUCE = Collective.broadcast, Collective.reduce
Calls = list[tuple[Collective, int]]
"""(collective, message bytes) in order."""


@dataclass(frozen=True)
class Speed:
    """The speed of one imagined machine: only the ratio of computation to communication matters."""

    us_per_element: float
    us_per_byte: float
    latency_us: float
    jitter: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Speed:
        """From compute-bound to communication-bound."""
        us_per_byte = float(np.exp(rng.uniform(np.log(2e-6), np.log(2e-4))))
        return cls(us_per_byte * 4.0 * float(np.exp(rng.uniform(-1.5, 2.5))), us_per_byte, float(rng.uniform(5, 60)),
                   float(rng.choice([0.0, 0.02, 0.1])))  # fmt: skip


class Timeline:
    """Collects calls with their start times; one stream of computation, one of communication."""

    def __init__(self, speed: Speed, rng: np.random.Generator) -> None:
        self._speed = speed
        self._rng = rng
        self._now_us = 0.0
        self._busy_until_us = 0.0
        self.collectives: list[int] = []
        self.message_bytes: list[int] = []
        self.start_us: list[float] = []

    def compute(self, n_elements: float) -> None:
        """Work on `n_elements` parameters."""
        noise = 1.0 + self._speed.jitter * float(self._rng.standard_normal())
        self._now_us += max(0.0, noise) * n_elements * self._speed.us_per_element

    def call(self, collective: Collective, n_bytes: float, *, waits: bool = False) -> None:
        """Enqueue one collective; `waits`: computation goes on only when it has ended."""
        start_us = max(self._now_us, self._busy_until_us)
        self._busy_until_us = start_us + self._speed.latency_us + n_bytes * self._speed.us_per_byte
        if waits:
            self._now_us = self._busy_until_us
        self.collectives.append(int(collective))
        self.message_bytes.append(max(1, int(n_bytes)))
        self.start_us.append(start_us)

    def drain(self) -> None:
        self._now_us = max(self._now_us, self._busy_until_us)

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """(collective, message_bytes, start in us) of all calls."""
        return (
            np.array(self.collectives, np.int64), np.array(self.message_bytes, np.int64),
            np.array(self.start_us, np.float64).astype(np.int64),
        )  # fmt: skip


def play_rounds(
    calls: Calls, n_rounds: int, rng: np.random.Generator, redraw: Callable[[], Calls] | None = None
) -> tuple[tuple[Ints, Ints, Ints], list[int]]:
    """Play a workload of rounds, with some computation before each call.

    Args:
        calls: of each round.
        redraw: draws other calls for each round; None: all rounds are equal.

    Returns:
        (collective, message_bytes, start in us) of all calls, and the index of each round's first call.
    """
    timeline, starts = Timeline(Speed.draw(rng), rng), []
    for _ in range(n_rounds):
        starts.append(len(timeline.collectives))
        for collective, n_bytes in calls if redraw is None else redraw():
            timeline.compute(float(rng.integers(1, 1000)) * 1000.0)
            timeline.call(collective, n_bytes)
    return timeline.columns(), starts
