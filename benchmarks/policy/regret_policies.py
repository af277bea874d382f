"""The policies that ours is compared with, on the same calls.

Each sees one call at a time: `choose(key)` returns an arm (index into that key's candidates, 0 is NCCL's own choice),
and `learn(key, arm, us)` takes its duration.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.lib.data.data_sets import Problem

CATASTROPHE: Final = math.log(2.0)
"""Factor (log) over NCCL's own choice."""


class Default:
    name = "nccl_default"

    def choose(self, key: int) -> int:
        return 0

    def learn(self, key: int, arm: int, us: float) -> None:
        """`key` and `arm` are indices of the key and of the candidate that ran; `us` was measured."""
        pass

    def end_of_step(self) -> None:
        pass


class Thompson(Default):
    """Per key, without a model: normal posterior on log time, noise 0.05, every arm once first."""

    name = "thompson"

    def __init__(self, problems: Sequence[Problem], rng: np.random.Generator) -> None:
        self._rng = rng
        self._sums = [np.zeros(len(problem.candidates)) for problem in problems]
        self._counts = [np.zeros(len(problem.candidates)) for problem in problems]
        self._asked = [np.zeros(len(problem.candidates), dtype=bool) for problem in problems]

    def choose(self, key: int) -> int:
        if (first := self._first_look(key)) is not None:
            return first
        return int(np.argmin(self._rng.normal(self._means(key), 0.05 / np.sqrt(np.maximum(self._counts[key], 1)))))

    def learn(self, key: int, arm: int, us: float) -> None:
        self._sums[key][arm] += math.log(us)
        self._counts[key][arm] += 1

    def _means(self, key: int) -> np.ndarray:
        """Means of measured arms; the others are never the least."""
        return np.where(self._counts[key] > 0, self._sums[key] / np.maximum(self._counts[key], 1), np.inf)

    def _first_look(self, key: int) -> int | None:
        """The next arm that was never asked for, even if its time is not known yet."""
        unasked = np.flatnonzero(~self._asked[key])
        if not len(unasked):
            return None
        self._asked[key][unasked[0]] = True
        return int(unasked[0])


class BoundedThompson(Thompson):
    """Never looks first at a setting that took twice as long as NCCL's own choice at a size within an octave.

    Arms are tried in a random order, NCCL's own first, so neighbouring sizes warn one another.
    """

    name = "thompson_bounded"

    def __init__(self, problems: Sequence[Problem], rng: np.random.Generator) -> None:
        super().__init__(problems, rng)
        self._order = [[0, *(1 + rng.permutation(len(one.candidates) - 1)).tolist()] for one in problems]
        self._near = [
            [
                at
                for at, other in enumerate(problems)
                if other.key.collective is one.key.collective
                and other.candidates == one.candidates
                and 0.5 <= other.message_bytes / one.message_bytes <= 2.0
            ]
            for one in problems
        ]

    def _first_look(self, key: int) -> int | None:
        waiting = self._order[key]
        while waiting:
            arm = waiting.pop(0)
            if not any(self._is_catastrophe(near, arm) for near in self._near[key]):
                return int(arm)
        return None

    def _is_catastrophe(self, key: int, arm: int) -> bool:
        means = self._means(key)
        return bool(np.isfinite(means[[0, arm]]).all() and means[arm] > means[0] + CATASTROPHE)


class Later(Default):
    """A policy that learns calls' times some steps later, as from a host that runs ahead of its GPU."""

    def __init__(self, policy: Default, n_steps: int) -> None:
        self.name = policy.name
        self._policy = policy
        self._steps: deque[list[tuple[int, int, float]]] = deque([[] for _ in range(n_steps + 1)])

    def choose(self, key: int) -> int:
        return self._policy.choose(key)

    def learn(self, key: int, arm: int, us: float) -> None:
        self._steps[-1].append((key, arm, us))

    def end_of_step(self) -> None:
        for key, arm, us in self._steps.popleft():
            self._policy.learn(key, arm, us)
        self._steps.append([])
