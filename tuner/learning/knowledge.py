"""Knowledge before a job's first measurement: earlier jobs' statistics and the fitted model.

Guesses are in log microseconds, a mean and a standard deviation; NaN: not available. `candidates` have the shape [n].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from ...store.records import BASELINE, Candidate, Collective, CommunicatorClass, DecisionKey
from ..modeling.correction.baked import DISBELIEF, UNKNOWN_STD, Correction
from ..modeling.cost_prior import CostPrior
from ..modeling.equal_channels import asked_for
from ..modeling.features import Floats, Ints, cell_of
from ..modeling.statistics import statistics as statistics_of
from .explaining.words import saved_with_doubt

if TYPE_CHECKING:
    from ...store.sqlite.database import CandidateStatistics, Store
    from ..modeling.knowledge_pool import KnowledgePool

RERUN_STD: Final = 0.04
"""How far (log) a setting's mean moves between two runs on one fabric; between two phases, twice as far."""
LEVEL_STD: Final = 0.3
"""How far (log) earlier jobs' measurements may be off for all settings together: other jobs may have loaded the
network all the time.
"""
MIN_COUNT: Final = 4
JOBS_COMPARED: Final = 8
"""The newest jobs of a fabric whose gains are compared."""
BETWEEN_JOBS_STD: Final = 0.003
"""How far (log) the gain of one setting over another at a key moves from one job to the next."""
PROVEN_Z: Final = 3.0
PROMISING_Z: Final = 0.5
"""A setting is proven, or provisional, if earlier jobs measured it faster by this many standard errors."""
MIDDLING_BYTES: Final = 1 << 20


class _Known(NamedTuple):
    """One setting's time, as earlier runs measured it."""

    log_us: float
    spread: float
    """Standard deviation (log) of one call."""
    n_calls: int
    level_std: float


Weighed = tuple[float, float]
"""Sum of weights (inverse variances), and sum of values times weights."""


class Promising(NamedTuple):
    """A candidate that was measured to be faster than the baseline, but not beyond doubt unless `is_proven`."""

    candidate: Candidate
    predicted_gain: tuple[float, float]
    """Gain (log) over the baseline, and its standard deviation."""
    reason: str
    is_proven: bool = False
    """It runs at once and is verified on the side."""


class Knowledge:
    """Results of earlier jobs; immutable. A job's Brain swaps it for a newer one when the trainer has finished."""

    def __init__(
        self,
        statistics: Sequence[CandidateStatistics] = (),
        correction: Correction | None = None,
        model_id: str = "",
        by_job: Iterable[Sequence[CandidateStatistics]] = (),
    ) -> None:
        self.correction = correction
        self.model_id = model_id
        self._by_key: dict[DecisionKey, dict[Candidate, _Known]] = {}
        self._by_place: dict[tuple[object, ...], dict[Candidate, _Known]] = {}
        for line in statistics:
            candidate = BASELINE if line.is_default else line.candidate
            if line.count < 1 or not line.median_us > 0 or candidate.is_half:
                continue
            spread = max(line.std_us / line.median_us, 0.01)
            entry = _Known(math.log(line.median_us), min(spread, 1.0), line.count, line.level_std)
            for known in (
                self._by_key.setdefault(line.key, {}),
                self._by_place.setdefault(_place(line.key), {}),
            ):
                if candidate not in known or known[candidate].n_calls < line.count:
                    known[candidate] = entry
        every = ((key.collective, one) for key, known in self._by_key.items() for one in known)
        self._cells = {(collective, *cell_of(one)) for collective, one in every if not one.chunk_bytes}
        self._gains = _gains_by_key([*by_job] or [statistics])
        self._has_chunk_sizes = any(line.candidate.chunk_bytes for line in statistics)
        self.recommendations: Mapping[DecisionKey, tuple[Candidate, float, float]] = {}
        self.recommended_by = ""

    def with_recommendations(self, winners: Mapping[DecisionKey, tuple[Candidate, float, float]], by: str) -> Knowledge:
        """The same, completed by recommendations of others (`by`): by key a setting, its gain (log) and its doubt."""
        both = copy.copy(self)
        both.recommendations, both.recommended_by = winners, by
        return both

    def without_chunk_sizes(self) -> Knowledge:
        """The same for a job whose plans can name no chunk sizes."""
        if not self._has_chunk_sizes:
            return self
        plain = copy.copy(self)
        plain._by_key, plain._by_place = _plain(self._by_key), _plain(self._by_place)
        plain._gains = _plain(self._gains)
        return plain

    def with_chunk_size(self, key: DecisionKey) -> list[Candidate]:
        """The settings with a chunk size that were measured at a key, in any phase."""
        return sorted((one for one in self._by_place.get(_place(key), {}) if one.chunk_bytes), key=str)

    def winners(self) -> dict[DecisionKey, tuple[Candidate, float, float]]:
        """The settings with the highest gain in earlier jobs, for other users."""
        found = {key: self.promising(key) for key in self._gains}
        return {key: (one.candidate, *one.predicted_gain) for key, one in found.items() if one is not None}

    @classmethod
    def from_store(
        cls,
        store: Store,
        fabric_id: str,
        pool: KnowledgePool | None = None,
        *,
        model: tuple[Correction | None, str] | None = None,
        without_job: str = "",
    ) -> Knowledge:
        """The results of earlier jobs on this fabric: statistics, and the model if it still applies.

        `model` is a correction (None: NCCL's cost is not corrected) and its id. Without it, the store's is used.
        """
        if model is None:
            from ..modeling.trainer import load_correction

            model = load_correction(store, fabric_id)
        of_fabric = (job.job_id for job in store.jobs() if job.fabric_id == fabric_id)
        jobs = [job_id for job_id in of_fabric if job_id != without_job][-JOBS_COMPARED:]
        by_job = [statistics_of(store, fabric_id, job_id) for job_id in jobs]
        statistics = statistics_of(store, fabric_id, without_job=without_job)
        if pool is not None:
            pool.publish(fabric_id, statistics, by_job)
            statistics, by_job = pool.with_others(fabric_id, statistics, by_job)
        return cls(statistics, *model, by_job)

    @property
    def n_keys(self) -> int:
        """Number of keys with statistics of earlier jobs."""
        return len(self._by_key)

    def prior(
        self, key: DecisionKey, message_bytes: float, candidates: Sequence[Candidate], costs: CostPrior
    ) -> tuple[Floats, Floats]:
        """Starting guess at one key, each array of shape [n]."""
        classes, nbytes = np.array([key.size_class]), np.array([message_bytes])
        means, stds = self.guess(key.communicator, key.collective, candidates, nbytes, classes, costs)
        self.apply_measurements(key, candidates, means[0], stds[0])
        return means[0], stds[0]

    def guess(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        message_bytes: Floats,
        classes: Ints,
        costs: CostPrior,
        *,
        carries_over: bool = True,
    ) -> tuple[Floats, Floats]:
        """Starting guess from cost and correction alone, [n_sizes, n]; `apply_measurements` adds a key's measurements.

        Args:
            carries_over: False: algorithms and protocols that no earlier job measured get NCCL's cost with its whole
                doubt, as other algorithms do not predict them. The doubt that all guesses at a communicator share is
                then left to `doubt_in_common`.
        """
        corrected = self.correction is not None
        means = costs.log_cost(communicator, collective, candidates, message_bytes, described_only=corrected)
        if self.correction is None:
            return means, np.full(means.shape, UNKNOWN_STD)
        shifts, stds = self.correction.predict(communicator, collective, candidates, classes)
        doubt = self._doubt_of_jump(communicator, collective, candidates, message_bytes, costs)
        if not carries_over:
            is_new = [not self.knows_of(collective, candidate) for candidate in candidates]
            shifts[:, is_new], stds[:, is_new] = 0.0, UNKNOWN_STD
            doubt = np.maximum(doubt - np.median(doubt), 0.0)
        return means + shifts, stds + doubt

    def doubt_in_common(self, family: tuple[CommunicatorClass, Collective], costs: CostPrior) -> float:
        """How far off (log) all guesses and earlier measurements may be together, as the network may have changed.

        0 if nothing is known from earlier jobs.
        """
        if self.correction is None and not self._by_key:
            return 0.0
        doubt = self._doubt_of_jump(*family, costs.candidates(*family), np.array([float(MIDDLING_BYTES)]), costs)
        return math.hypot(LEVEL_STD, float(np.median(doubt)))

    def _doubt_of_jump(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        message_bytes: Floats,
        costs: CostPrior,
    ) -> Floats:
        """The doubt (log) to add because of a jump in NCCL's cost, [n_sizes, n_candidates].

        A jump may exist in NCCL's cost only. Nobody has measured it if the nearest measured communicator is on the
        other side of it.
        """
        nearest = communicator if self.correction is None else self.correction.nearest(communicator)
        if nearest == communicator:
            return np.zeros((len(message_bytes), len(candidates)))
        here, there = (
            costs.log_jump(place, collective, candidates, message_bytes) for place in (communicator, nearest)
        )
        doubt: Floats = DISBELIEF * np.abs(here - there)
        return doubt

    def apply_measurements(self, key: DecisionKey, candidates: Sequence[Candidate], mean: Floats, std: Floats) -> None:
        """Replace guesses by measurements at the key, or at the same key of another phase, if those are surer.

        `mean` and `std`, of shape [n], are changed in place.
        """
        found = self._by_key.get(key, {}), self._by_place.get(_place(key), {})
        if not found[1]:
            return
        own, elsewhere = (_as_asked(known, candidates, key) for known in found)
        for index, candidate in enumerate(candidates):
            entry, floor = own.get(candidate), RERUN_STD
            if entry is None:
                entry, floor = elsewhere.get(candidate), 2.0 * RERUN_STD
            if entry is not None:
                known_std = math.hypot(floor, entry.level_std, entry.spread / math.sqrt(entry.n_calls))
                if known_std < std[index]:
                    mean[index], std[index] = entry.log_us, known_std

    def knows_of(self, collective: int, candidate: Candidate) -> bool:
        """Whether earlier jobs measured this algorithm and protocol anywhere; True if nothing was ever measured."""
        return not self._cells or candidate.is_baseline or (collective, *cell_of(candidate)) in self._cells

    def decided(self, key: DecisionKey) -> tuple[Candidate, str] | None:
        """The candidate that earlier jobs proved to be fastest at `key`, with the evidence."""
        found = self._gaining(key, PROVEN_Z)
        return None if found is None else (found.candidate, found.reason)

    def promising(self, key: DecisionKey) -> Promising | None:
        """The candidate with the highest gain at `key` in earlier jobs; None without one."""
        return self._gaining(key, PROMISING_Z)

    def _gaining(self, key: DecisionKey, z: float) -> Promising | None:
        best: Promising | None = None
        for candidate, (weight, total) in self._gains.get(key, {}).items():
            gain, doubt = total / weight, 1.0 / math.sqrt(weight)
            if gain > max(z * doubt, best.predicted_gain[0] if best is not None else 0.0):
                best = Promising(candidate, (gain, doubt), f"measured before: {saved_with_doubt(gain, doubt)}")
        return best

    def canary(self, key: DecisionKey) -> tuple[Candidate, float] | None:
        """The setting that others recommend for a key, and its gain (log), if this fabric's earlier jobs have none."""
        recommended = self.recommendations.get(key)
        if recommended is None or self.promising(key) is not None:
            return None
        known = self._by_key.get(key, {}).get(recommended[0])
        return recommended[:2] if known is None or known.n_calls < MIN_COUNT else None


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _plain(found: dict[_Key, dict[Candidate, _Value]]) -> dict[_Key, dict[Candidate, _Value]]:
    plain = {key: {one: value for one, value in of_key.items() if not one.chunk_bytes} for key, of_key in found.items()}
    return {key: of_key for key, of_key in plain.items() if of_key}


def _as_asked(
    known: dict[Candidate, _Known], candidates: Sequence[Candidate], key: DecisionKey
) -> dict[Candidate, _Known]:
    """The measured time of each requested setting among `candidates`; from the one with most calls if several ran."""
    others = known.keys() - {*candidates, BASELINE}  # the baseline has no other name
    if not others:
        return known
    offered = {str(one) for one in candidates}
    found = {one: entry for one, entry in known.items() if one not in others}
    for ran in sorted(others, key=str):
        name = asked_for(ran, offered, key)
        if name not in found or found[name].n_calls < known[ran].n_calls:
            found[name] = known[ran]
    return found


def _gains_by_key(by_job: Iterable[Sequence[CandidateStatistics]]) -> dict[DecisionKey, dict[Candidate, Weighed]]:
    """Gains over the baseline (log) by key and candidate.

    Durations of different jobs are not compared: the network may have differed.
    """
    found: dict[DecisionKey, dict[Candidate, Weighed]] = {}
    for statistics in by_job:
        lines = [line for line in statistics if line.count >= MIN_COUNT and line.median_us > 0]
        baselines = {line.key: line for line in lines if line.is_default}
        for line in lines:
            base = baselines.get(line.key)
            if line.is_default or base is None or line.candidate.protocol is None:
                continue
            variance = BETWEEN_JOBS_STD**2 + line.level_std**2
            for side in (line, base):
                variance += max(side.std_us / side.median_us, 0.01) ** 2 / side.count
            of_key = found.setdefault(line.key, {})
            weight, total = of_key.get(line.candidate, (0.0, 0.0))
            gain = math.log(base.median_us / line.median_us)
            of_key[line.candidate] = weight + 1.0 / variance, total + gain / variance
    return found


def _place(key: DecisionKey) -> tuple[object, ...]:
    return key.communicator, key.collective, key.size_class
