"""Estimates of a shape's cost under a candidate, with their origin.

There are three grades, best first: measured in this trace, measured elsewhere on the same fabric (the store),
predicted. A figure from elsewhere or from a model is carried over as a *ratio to the baseline*, when
the baseline's cost is known at both ends: sizes within a size class, other load on the machine and a
phase's contention then cancel.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ....agent.nccl.cost_model import in_effect
from ....store.records import (
    BASELINE,
    SIZE_CLASSES_PER_OCTAVE,
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class_floor,
)
from .legality import is_known_to_sum, may_run
from .medians import Estimate, Grade, measured_elsewhere, measured_here
from .table import CollectiveTable, Shape

CARRIED_NOISE: Final = 0.05
"""Relative standard error added if a ratio comes from another place, phase or size in the class."""
MAX_INTERPOLATED_CLASSES: Final = SIZE_CLASSES_PER_OCTAVE
"""Sweeps measure each octave: a size is interpolated between two measured ones at this distance or less."""

DOUBT_PER_OCTAVE: Final = 0.15
"""Standard error of a prediction's logarithm per doubling of bytes or channels from the nearest measurement."""
UNSEEN_DOUBT: Final = math.log(2)
"""Largest standard error (log), also that of an algorithm and protocol never measured on the communicator."""


class _Neighbour(NamedTuple):
    """A candidate's ratio to the baseline at another size."""

    size_class: int
    log_ratio: float
    log_baseline_us: float
    error: float
    n_samples: int


Prediction = tuple[float, float]
"""(cost_us, relative standard error)."""
ShapeKey = tuple[CommunicatorClass, Collective, Phase, int]
_Kind = tuple[CommunicatorClass, Collective, tuple[Algorithm | None, Protocol | None]]
Predictor = Callable[[Shape, Candidate], Prediction | None]


class CostEstimates:
    """Estimates by shape and candidate, from a trace, the store's statistics and a predictor."""

    def __init__(
        self,
        table: CollectiveTable,
        statistics: Iterable[CandidateStatistics] = (),
        predictor: Predictor | None = None,
    ) -> None:
        self.sums = is_known_to_sum(table)
        """Whether the job's reduce-scatters are known to sum; otherwise they may average."""
        self._here = measured_here(table)
        self._here_by_shape: dict[Shape, set[Candidate]] = {}
        for shape, candidate in self._here:
            self._here_by_shape.setdefault(shape, set()).add(candidate)
        self._elsewhere = measured_elsewhere(statistics)
        self._predictor = predictor
        self._by_shape_key: dict[ShapeKey, dict[Candidate, Estimate]] = {}
        self._known: dict[tuple[Shape, Candidate], Estimate | None] = {}
        self._seen = self._points_seen()

    def may_run(self, shape: Shape, candidate: Candidate) -> bool:
        """Whether NCCL is sure to accept the setting; otherwise it may run its own choice instead."""
        return may_run(shape, candidate, self.sums)

    def estimate(self, shape: Shape, candidate: Candidate) -> Estimate | None:
        """The best estimate; None: nothing is known, or NCCL may refuse the setting."""
        if (shape, candidate) not in self._known:
            self._known[shape, candidate] = self._estimate(shape, candidate)
        return self._known[shape, candidate]

    def _estimate(self, shape: Shape, candidate: Candidate) -> Estimate | None:
        if not self.may_run(shape, candidate):
            return None
        ran = in_effect(shape.collective, shape.message_bytes, candidate)
        return (
            self._here.get((shape, candidate))
            or self._here.get((shape, ran))
            or self._from_other_phase(shape, candidate)
            or self._from_other_phase(shape, ran)
            or self._from_elsewhere(shape, candidate)
            or self._predicted(shape, ran)
        )

    def predicted(self, shape: Shape, candidate: Candidate) -> Prediction | None:
        """The model's prediction, without measurements."""
        return None if self._predictor is None else self._predictor(shape, candidate)

    def with_predictor(self, predictor: Predictor | None) -> CostEstimates:
        """A copy with the same measurements and another model."""
        other = copy.copy(self)
        other._predictor, other._known = predictor, {}
        return other

    def on_other_fabric(
        self, statistics: Iterable[CandidateStatistics], predictor: Predictor | None
    ) -> CostEstimates:
        """A copy for another fabric, without the trace's measurements."""
        other = self.with_predictor(predictor)
        other._here, other._here_by_shape, other._by_shape_key = {}, {}, {}
        other._elsewhere = measured_elsewhere(statistics)
        other._seen = other._points_seen()
        return other

    def measured_candidates(self, shape: Shape) -> list[Candidate]:
        """Candidates with measurements for `shape`, here or elsewhere, in a fixed order.

        Among those from elsewhere with the same effect at this size, only one is here. Algorithms under an unknown
        protocol are included, which no plan can request: see `candidates`.
        """
        here = self._here_by_shape.get(shape, set())
        effects = {in_effect(shape.collective, shape.message_bytes, candidate) for candidate in here}
        near = []
        for candidate in sorted(self._measured_at(shape) - here, key=lambda one: (str(_cell(one)), one.n_channels)):
            effect = in_effect(shape.collective, shape.message_bytes, candidate)
            found = None if effect in effects else self.estimate(shape, candidate)
            if found is not None and found.grade is not Grade.predicted:
                effects.add(effect)
                near.append(candidate)
        return sorted([*here, *near], key=str)

    def candidates(self, shape: Shape) -> list[Candidate]:
        """Those of `measured_candidates` that a plan can request."""
        return [one for one in self.measured_candidates(shape) if not one.lacks_protocol]

    def nearest_winner(self, shape: Shape) -> Candidate | None:
        """The fastest setting at the nearest size class measured elsewhere; None: none is within an octave."""
        own_class = shape.key.size_class
        for distance in range(MAX_INTERPOLATED_CLASSES + 1):
            for size_class in (own_class - distance, own_class + distance):
                known = self._elsewhere_at(shape, size_class)
                usable = [one for one in known if self.may_run(shape, one) and not one.lacks_protocol]
                if usable:
                    return min(usable, key=lambda candidate: known[candidate].cost_us)
        return None

    def _from_other_phase(self, shape: Shape, candidate: Candidate) -> Estimate | None:
        """Estimate from this trace's calls of the same bytes in another phase, the one with most calls."""
        found = [
            (there, self._here.get((other, BASELINE)))
            for phase in Phase
            for other in [dataclasses.replace(shape, phase=phase)]
            if (there := self._here.get((other, candidate))) is not None
        ]
        if not found:
            return None
        return self._carried(shape, *max(found, key=lambda one: one[0].n_samples))

    def _elsewhere_at(self, shape: Shape, size_class: int) -> dict[Candidate, Estimate]:
        """The store's estimates for the shape's own phase, or for the phase with most samples."""
        place = (shape.communicator, shape.collective, shape.phase, size_class)
        if place not in self._by_shape_key:
            keys = [DecisionKey(shape.communicator, shape.collective, phase, size_class) for phase in Phase]
            own = self._elsewhere.get(DecisionKey(*place))
            if own is not None and len(own) > 1:
                self._by_shape_key[place] = own
            else:
                phases = [found for key in keys if (found := self._elsewhere.get(key)) is not None]
                self._by_shape_key[place] = max(
                    phases, key=lambda found: sum(one.n_samples for one in found.values()), default={}
                )
        return self._by_shape_key[place]

    def _elsewhere_as(self, shape: Shape, size_class: int, candidate: Candidate) -> Estimate | None:
        """The store's estimate of `candidate`, or of the setting that NCCL runs for it at that size."""
        known = self._elsewhere_at(shape, size_class)
        return known.get(candidate) or known.get(in_effect(shape.collective, size_class_floor(size_class), candidate))

    def _from_elsewhere(self, shape: Shape, candidate: Candidate) -> Estimate | None:
        size_class = shape.key.size_class
        found = self._elsewhere_as(shape, size_class, candidate)
        if found is not None:
            return self._carried(shape, found, self._elsewhere_at(shape, size_class).get(BASELINE))
        between = self._interpolated(shape, candidate)
        if between is not None or candidate.is_baseline or candidate.n_channels:
            return between
        # Without an opinion on channels, NCCL takes about as many as there are.
        others = [one for one in self._measured_at(shape) if _cell(one) == _cell(candidate)]
        most = max(others, key=lambda one: one.n_channels, default=None)
        estimate = None if most is None else self._from_elsewhere(shape, most)
        return estimate and dataclasses.replace(estimate, error=math.hypot(estimate.error, CARRIED_NOISE))

    def _interpolated(self, shape: Shape, candidate: Candidate) -> Estimate | None:
        """Interpolate between the nearest size classes on either side with `candidate`, and the baseline if any has it.

        An active sweep does not measure the baseline at every size. Without the baseline there is no ratio, and the
        cost itself is interpolated.
        """
        low, high = (self._nearest(shape, candidate, direction, with_baseline=True) for direction in (-1, 1))
        is_ratio = low is not None and high is not None
        if not is_ratio:
            low, high = (self._nearest(shape, candidate, direction, with_baseline=False) for direction in (-1, 1))
        if low is None or high is None:
            return None
        position = math.log2(shape.message_bytes) * SIZE_CLASSES_PER_OCTAVE
        share = min(max((position - low.size_class) / (high.size_class - low.size_class), 0.0), 1.0)
        # Halfway between sizes whose ratios differ, the ratio may be either's.
        doubt = abs(high.log_ratio - low.log_ratio) * min(share, 1 - share) if is_ratio else 0.0
        error, n_samples = math.hypot(low.error, high.error, doubt), low.n_samples + high.n_samples
        baseline_us = math.exp((1 - share) * low.log_baseline_us + share * high.log_baseline_us)
        cost_us = baseline_us * math.exp((1 - share) * low.log_ratio + share * high.log_ratio)
        there = Estimate(cost_us, error, Grade.measured_elsewhere, n_samples)
        baseline = Estimate(baseline_us, 0.0, Grade.measured_elsewhere) if is_ratio else None
        return self._carried(shape, there, baseline)

    def _nearest(self, shape: Shape, candidate: Candidate, direction: int, *, with_baseline: bool) -> _Neighbour | None:
        """The next size class in that direction with the candidate (and the baseline), at most an octave away.

        Without the baseline the ratio is to 1 us.
        """
        for distance in range(1, MAX_INTERPOLATED_CLASSES + 1):
            size_class = shape.key.size_class + direction * distance
            found = self._elsewhere_as(shape, size_class, candidate)
            baseline: Estimate | None = Estimate(1.0, 0.0, Grade.measured_elsewhere)
            if with_baseline:
                baseline = self._elsewhere_at(shape, size_class).get(BASELINE)
            if found is not None and baseline is not None:
                ratio, error = found.cost_us / baseline.cost_us, math.hypot(found.error, baseline.error)
                return _Neighbour(size_class, math.log(ratio), math.log(baseline.cost_us), error, found.n_samples)
        return None

    def _measured_at(self, shape: Shape) -> set[Candidate]:
        """Candidates that were measured elsewhere at the shape's size or near it."""
        own_class = shape.key.size_class
        span = range(own_class - MAX_INTERPOLATED_CLASSES, own_class + MAX_INTERPOLATED_CLASSES + 1)
        return {candidate for size_class in span for candidate in self._elsewhere_at(shape, size_class)}

    def _predicted(self, shape: Shape, candidate: Candidate) -> Estimate | None:
        predicted = None if candidate.lacks_protocol else self.predicted(shape, candidate)
        if predicted is None:
            return None
        baseline = self.predicted(shape, BASELINE)
        there = Estimate(predicted[0], math.hypot(predicted[1], self._doubt(shape, candidate)), Grade.predicted)
        if baseline is None:
            return self._carried(shape, there, None)
        found = self._carried(shape, there, Estimate(*baseline, Grade.predicted))
        # If the model's error at this shape is known, it counts as its error for the candidate.
        known = self._here.get((shape, BASELINE))
        miss = 0.0 if known is None else abs(math.log(known.cost_us / baseline[0]))
        return dataclasses.replace(found, error=math.hypot(found.error, miss))

    def _points_seen(self) -> dict[_Kind, set[tuple[float, float]]]:
        """(log2 bytes, log2 channels) at which each algorithm and protocol was measured, here or elsewhere."""
        seen: dict[_Kind, set[tuple[float, float]]] = {}
        here = ((shape.communicator, shape.collective, shape.message_bytes, one) for shape, one in self._here)
        elsewhere = (
            (key.communicator, key.collective, size_class_floor(key.size_class), one)
            for key, known in self._elsewhere.items()
            for one in known
        )
        for communicator, collective, nbytes, one in (*here, *elsewhere):
            if not one.is_baseline:
                point = math.log2(nbytes), math.log2(max(1, one.n_channels))
                seen.setdefault((communicator, collective, _cell(one)), set()).add(point)
        return seen

    def _doubt(self, shape: Shape, candidate: Candidate) -> float:
        """A prediction's added error, by its distance to measurements of this algorithm and protocol."""
        if candidate.is_baseline:
            return 0.0
        log_bytes, log_channels = math.log2(shape.message_bytes), math.log2(max(1, candidate.n_channels))
        octaves = (
            abs(log_bytes - nbytes) + abs(log_channels - channels)
            for nbytes, channels in self._seen.get((shape.communicator, shape.collective, _cell(candidate)), ())
        )
        return min(UNSEEN_DOUBT, DOUBT_PER_OCTAVE * min(octaves, default=math.inf))

    def _carried(self, shape: Shape, there: Estimate, baseline_there: Estimate | None) -> Estimate:
        """Estimate `there`, scaled to this trace by the ratio to the baseline if both have a baseline."""
        baseline_here = self._here.get((shape, BASELINE))
        if baseline_here is None or baseline_there is None:
            return Estimate(there.cost_us, math.hypot(there.error, CARRIED_NOISE), there.grade, there.n_samples)
        error = math.hypot(there.error, CARRIED_NOISE, baseline_here.error)
        cost_us = baseline_here.cost_us * there.cost_us / baseline_there.cost_us
        return Estimate(cost_us, error, there.grade, there.n_samples)


def _cell(candidate: Candidate) -> tuple[Algorithm | None, Protocol | None]:
    return candidate.algorithm, candidate.protocol
