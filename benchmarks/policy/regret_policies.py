"""The policies that `policy_regret.py` compares: what peers do, on the same calls as ours.

Each sees one call at a time: `choose(key)` names an arm (index into that key's candidates, 0 is NCCL's own
choice), `learn(key, arm, us)` gives what it took. Offline peers are given a sweep of every other size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from zerotune.store.records import Candidate, DecisionKey

CATASTROPHE: Final = math.log(2.0)
"""Times (log) of NCCL's own choice."""


@dataclass(frozen=True)
class Problem:
    """One key: its candidates, the baseline first, with true medians (us) and the noise (log) of a call."""

    key: DecisionKey
    message_bytes: int
    candidates: tuple[Candidate, ...]
    ran_by_default: Candidate
    truth_us: tuple[float, ...]
    noise: float


class Default:
    name = "nccl_default"

    def choose(self, key: int) -> int:
        return 0

    def learn(self, key: int, arm: int, us: float) -> None:
        """Take what a call took.

        Args:
            key: index of the key.
            arm: index of the candidate that ran.
            us: measured microseconds.
        """
        pass

    def end_of_step(self) -> None:
        pass


class Offline(Default):
    """Commits to what a sweep of the *other* sizes says: the argmin table, the neighbour or a tree."""

    def __init__(self, problems: Sequence[Problem], rng: np.random.Generator, how: str) -> None:
        self.name = how
        winners: list[Candidate] = []
        for problem in problems:
            sweep = np.median(
                np.log(problem.truth_us)[:, None] + rng.normal(0, problem.noise, (len(problem.truth_us), 3)),
                axis=1,
            )
            winners.append(problem.candidates[int(np.argmin(sweep))])
        self._arms = [self._arm(problem, self._pick(at, problems, winners, how)) for at, problem in enumerate(problems)]

    def choose(self, key: int) -> int:
        return self._arms[key]

    def _pick(self, at: int, problems: Sequence[Problem], winners: Sequence[Candidate], how: str) -> Candidate:
        here = problems[at]
        others = [
            (problem, winner)
            for problem, winner in zip(problems, winners, strict=True)
            if problem.key.size_class != here.key.size_class
            and problem.key.collective is here.key.collective
            and problem.key.communicator == here.key.communicator
        ]
        if not others:
            return Candidate()
        if how == "argmin_table":  # bins by power of two: the largest swept size that is not larger
            below = [pair for pair in others if pair[0].message_bytes < here.message_bytes]
            return max(below or others[:1], key=lambda pair: pair[0].message_bytes)[1]
        if how == "nearest_neighbour":
            return min(others, key=lambda pair: abs(math.log(pair[0].message_bytes / here.message_bytes)))[1]
        from sklearn.tree import DecisionTreeClassifier

        labels = sorted({winner for _, winner in others}, key=str)
        tree = DecisionTreeClassifier(random_state=0).fit(
            [[math.log2(problem.message_bytes)] for problem, _ in others],
            [labels.index(winner) for _, winner in others],
        )
        return labels[int(tree.predict([[math.log2(here.message_bytes)]])[0])]

    @staticmethod
    def _arm(problem: Problem, candidate: Candidate) -> int:
        return problem.candidates.index(candidate) if candidate in problem.candidates else 0


class Bandit(Default):
    """Per key, without a model; subclasses say what is tried next."""

    def __init__(self, problems: Sequence[Problem], rng: np.random.Generator) -> None:
        self._rng = rng
        self._sums = [np.zeros(len(problem.candidates)) for problem in problems]
        self._counts = [np.zeros(len(problem.candidates)) for problem in problems]
        self._asked = [np.zeros(len(problem.candidates), dtype=bool) for problem in problems]
        self._problems = problems

    def learn(self, key: int, arm: int, us: float) -> None:
        self._sums[key][arm] += math.log(us)
        self._counts[key][arm] += 1

    def _means(self, key: int) -> np.ndarray:
        """Of what was measured; the others are never the least."""
        return np.where(self._counts[key] > 0, self._sums[key] / np.maximum(self._counts[key], 1), np.inf)

    def _first_look(self, key: int) -> int | None:
        """The next arm that was never asked for, be it that what it took is not told yet."""
        unasked = np.flatnonzero(~self._asked[key])
        if not len(unasked):
            return None
        self._asked[key][unasked[0]] = True
        return int(unasked[0])


class RoundRobin(Bandit):
    """Four arms (the cells, all channels) for seven calls each, then the best for ever."""

    name = "round_robin"

    def choose(self, key: int) -> int:
        arms = _full_channel_arms(self._problems[key])[:4]
        for arm in arms:
            if self._counts[key][arm] < 7:
                return arm
        return min(arms, key=lambda arm: self._means(key)[arm])


class Ucb1(Bandit):
    """Lower confidence bound on log time, every arm once first."""

    name = "ucb1"

    def choose(self, key: int) -> int:
        if (first := self._first_look(key)) is not None:
            return first
        counts = np.maximum(self._counts[key], 1)
        return int(np.argmin(self._means(key) - 0.1 * np.sqrt(2 * math.log(counts.sum()) / counts)))


class Thompson(Bandit):
    """Normal posterior on log time, noise 0.05, every arm once first."""

    name = "thompson"

    def choose(self, key: int) -> int:
        if (first := self._first_look(key)) is not None:
            return first
        return int(np.argmin(self._rng.normal(self._means(key), 0.05 / np.sqrt(np.maximum(self._counts[key], 1)))))


class BoundedThompson(Thompson):
    """Never looks first at what took twice as long as NCCL's own choice at a size within an octave.

    Arms are looked at in an order of chance, NCCL's own first, so neighbouring sizes warn one another.
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
    """A policy that is told what calls took some steps later, as a host that runs ahead of its GPU tells it."""

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


class CoordinateDescent(Bandit):
    """Cell and channels in turn, five calls per point, from three starts; then the best for ever."""

    name = "coordinate_descent"

    def __init__(self, problems: Sequence[Problem], rng: np.random.Generator) -> None:
        super().__init__(problems, rng)
        self._plans = [self._search(at) for at in range(len(problems))]
        self._now = [next(plan, None) for plan in self._plans]

    def choose(self, key: int) -> int:
        while (now := self._now[key]) is not None and self._counts[key][now] >= 5:
            self._now[key] = next(self._plans[key], None)
        if now is not None:
            return now
        seen = np.where(self._counts[key] > 0, self._means(key), np.inf)
        return int(np.argmin(seen))

    def _search(self, key: int) -> Iterator[int]:
        candidates = self._problems[key].candidates
        places = {(c.algorithm, c.protocol, c.n_channels): at for at, c in enumerate(candidates) if at}
        cells = sorted({place[:2] for place in places}, key=str)
        for _ in range(3):
            here = list(places.values())[int(self._rng.integers(len(places)))] if places else 0
            yield here
            moved = True
            while moved and places:
                moved = False
                cell = (candidates[here].algorithm, candidates[here].protocol)
                rungs = sorted(place[2] for place in places if place[:2] == cell)
                at = rungs.index(candidates[here].n_channels)
                line = [places[(*cell, rungs[to])] for to in (at - 1, at + 1) if 0 <= to < len(rungs)]
                cross = [
                    places[(*other, candidates[here].n_channels)]
                    for other in cells
                    if other != cell and (*other, candidates[here].n_channels) in places
                ]
                for there in (*line, *cross):
                    yield there
                    if self._means(key)[there] < self._means(key)[here]:
                        here, moved = there, True


def _full_channel_arms(problem: Problem) -> list[int]:
    best: dict[object, int] = {}
    for at, candidate in enumerate(problem.candidates):
        cell = (candidate.algorithm, candidate.protocol)
        if cell not in best or candidate.n_channels > problem.candidates[best[cell]].n_channels:
            best[cell] = at
    return list(best.values())


def peers(problems: Sequence[Problem], rng: np.random.Generator) -> list[Default]:
    offline: Mapping[str, Default] = {
        how: Offline(problems, rng, how) for how in ("argmin_table", "nearest_neighbour", "decision_tree")
    }
    online = [policy(problems, rng) for policy in (RoundRobin, Ucb1, Thompson, CoordinateDescent)]
    return [Default(), *offline.values(), *online]
