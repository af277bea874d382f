"""Predicts the job's step with other ranks, another fabric, other buckets, or another ZeRO stage.

The trace's step is reshaped (reshape.py), and every collective's cost is estimated again: by the store's measurements
of the new fabric, or else by NCCL's cost model with the learned correction. That model is scaled by its error on the
same collective in the trace. Predictions have their own doubt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ....agent.nccl.fabric_model import Fabric
from ....store.errors import UserError
from ....store.records import BASELINE, Candidate, Collective
from ...advice.prediction.timeline import steady_step
from ...modeling.cost_prior import CostPrior
from .estimates import CostEstimates, Prediction, Predictor
from .evidence import FabricEvidence
from .judging import judge
from .legality import without_refused
from .policies import Policy, PolicyContext
from .reshape import StepProgram, with_buckets, with_ranks, with_stage
from .result import StepEstimate, WhatIf
from .steps import LoggedSteps, correction, step_estimates, usual_durations
from .table import Shape
from .usual_steps import TimelineCall

MAX_RANKS: Final = 16384
MIN_BUCKET_BYTES: Final = 1024
CALIBRATING_LOG_BYTES: Final = math.log(16)
LEAST_CALIBRATED_ERROR: Final = 0.15
CALIBRATED_ERROR_PER_OCTAVE: Final = 0.2
"""Standard error of the scaled model's logarithm per doubling away from a measured size, as NCCL's choice may become a
bad one there. Over the shipped fabrics the spread is 0.15 per octave, with long tails.
"""
STAGE_DOUBT: Final = 0.3
"""Doubt (95 %) as a share of step time: a trace does not show how many collectives another stage would need."""


@dataclass(frozen=True)
class JobChange:
    """Properties of the changed job; None: as logged."""

    n_ranks: int | None = None
    fabric: Fabric | None = None
    bucket_bytes: int | None = None
    stage: int | None = None

    def __post_init__(self) -> None:
        if self.n_ranks is not None and not 2 <= self.n_ranks <= MAX_RANKS:
            raise UserError(f"{self.n_ranks} ranks cannot be judged", f"ask for 2 to {MAX_RANKS:,}")
        if self.bucket_bytes is not None and self.bucket_bytes < MIN_BUCKET_BYTES:
            raise UserError(
                f"buckets of {self.bucket_bytes:,} bytes are too small", f"ask for {MIN_BUCKET_BYTES:,} or more"
            )

    def __str__(self) -> str:
        words = [
            None if self.n_ranks is None else f"{self.n_ranks:,} ranks",
            None if self.fabric is None else f"fabric {self.fabric.name}",
            None if self.bucket_bytes is None else f"gradient buckets of {self.bucket_bytes:,} bytes",
            None if self.stage is None else f"ZeRO stage {self.stage}",
        ]
        return ", ".join(word for word in words if word)


def what_if(
    change: JobChange,
    logged: LoggedSteps,
    policies: Mapping[str, Policy],
    context: PolicyContext,
    evidence: FabricEvidence,
) -> WhatIf:
    """Judge policies on the step of a changed job.

    A change to the job's present properties keeps program, durations and evidence. `context` is the logged job's;
    `evidence` is of the changed job's fabric.

    Raises:
        UserError: the step cannot be changed in this way.
        FabricError: the ranks do not fit, or the fabric is not described.
    """
    assert logged.model is not None
    elsewhere = change.fabric is not None and change.fabric.fabric_id != logged.fabric_id
    fabric = change.fabric or context.fabric
    before = logged.model.program
    program, assumptions = _reshaped(change, before, fabric, elsewhere)
    learned = evidence
    if fabric is not None and (n_nodes := _n_nodes(program, fabric)) > fabric.max_nodes:
        assumptions.append(
            f"fabric {fabric.name} describes {fabric.max_nodes} nodes: beyond them NCCL's cost model alone is asked"
        )
        fabric, learned = fabric.with_nodes(n_nodes), FabricEvidence()
    counts = Counter(call.shape for call in program.calls)
    costs = None if fabric is None else CostPrior(fabric.describe(), fabric)
    if costs is not None and fabric is not None and not context.estimates.sums:
        without_refused(costs, fabric, counts)
    predict = None if costs is None or fabric is None else learned.predictor(costs, fabric)
    if elsewhere:
        assumptions.append("computation takes as long as it was logged")
        assumptions.append("the trace's own measurements are of another fabric: they are not used")
        estimates = context.estimates.on_other_fabric(evidence.statistics, predict)
    elif program == before:
        assumptions = ["the job has these properties already: nothing changes"]
        estimates = context.estimates
    else:
        if predict is not None:
            predict = _scaled(predict, _calibration(before, program, context.estimates), bool(learned.model_error))
        estimates = context.estimates.with_predictor(predict)
    n_steps = logged.facts.n_steps
    asked = replace(
        context,
        estimates=estimates,
        knowledge=learned.knowledge,
        costs=costs,
        counts={shape: count * n_steps for shape, count in counts.items()},
        n_steps=n_steps,
        fabric=fabric,
    )
    return _judged(change, logged, before, program, policies, asked, counts, assumptions)


def _reshaped(
    change: JobChange, program: StepProgram, fabric: Fabric | None, elsewhere: bool
) -> tuple[StepProgram, list[str]]:
    assumptions = ["compute gaps and their order stay"]
    before = program
    if change.stage is not None and (program := with_stage(program, change.stage)) is not before:
        assumptions.append(
            "stages 1 and 2 communicate alike; the optimizer's time is not rescaled; gathers of stage 3 are"
            " prefetched by one unit, units are as large as the logged collectives; backward computes twice what"
            " forward does"
        )
    before = program
    if change.bucket_bytes is not None and (program := with_buckets(program, change.bucket_bytes)) is not before:
        assumptions.append("gradients become ready evenly between the issues of the logged buckets")
    now_ranks = max(call.shape.n_ranks for call in program.calls)
    n_ranks = change.n_ranks or now_ranks
    if fabric is None and n_ranks != now_ranks:
        raise UserError("other ranks need a described fabric", "name one with --on-fabric")
    if fabric is not None and (elsewhere or n_ranks != now_ranks):
        program = with_ranks(program, n_ranks, fabric.n_nodes(range(n_ranks)))
        if n_ranks != now_ranks:
            assumptions.append("each rank's batch stays, and so does its computation; groups of fewer ranks stay")
    return program, assumptions


def _n_nodes(program: StepProgram, fabric: Fabric) -> int:
    return max(-(-call.shape.n_ranks // fabric.ranks_per_node) for call in program.calls)


class _Scale(NamedTuple):
    """Ratio of collectives' times to the model's, and the standard error of its logarithm."""

    factor: float
    error: float | None
    """None: the model's own doubt applies."""


def _calibration(before: StepProgram, after: StepProgram, estimates: CostEstimates) -> dict[Shape, _Scale]:
    """Scales of the changed step's shapes, interpolated between sizes of the same collective in the trace.

    On communicators that the trace has measured, the model only gives the difference between sizes.
    """
    known: dict[Collective, dict[float, float]] = {}
    for shape in {call.shape for call in before.calls}:
        measured, predicted = estimates.estimate(shape, BASELINE), estimates.predicted(shape, BASELINE)
        if measured is not None and predicted is not None:
            ratio = math.log(measured.cost_us / predicted[0])
            known.setdefault(shape.collective, {})[math.log(shape.message_bytes)] = ratio
    everything = {log_bytes: ratio for points in known.values() for log_bytes, ratio in points.items()}
    communicators = {call.shape.communicator for call in before.calls}
    scale = {}
    for shape in {call.shape for call in after.calls}:
        wanted = math.log(shape.message_bytes)
        points = _near(known.get(shape.collective, {}), wanted) or _near(everything, wanted)
        if not points:
            continue
        log_bytes, ratios = list(points), list(points.values())
        factor = math.exp(float(np.interp(wanted, log_bytes, ratios)))
        octaves = min(abs(wanted - one) for one in log_bytes) / math.log(2)
        error = max(float(np.std(ratios)) / 2, LEAST_CALIBRATED_ERROR) + CALIBRATED_ERROR_PER_OCTAVE * octaves
        scale[shape] = _Scale(factor, error if shape.communicator in communicators else None)
    return scale


def _near(points: Mapping[float, float], log_bytes: float) -> dict[float, float]:
    """The points of similar size: a model's error in latency says nothing about its error in bandwidth."""
    return {at: ratio for at, ratio in sorted(points.items()) if abs(at - log_bytes) < CALIBRATING_LOG_BYTES}


def _scaled(predict: Predictor, scale: Mapping[Shape, _Scale], has_learned: bool) -> Predictor:
    def scaled(shape: Shape, candidate: Candidate) -> Prediction | None:
        found = predict(shape, candidate)
        if found is None or shape not in scale:
            return found
        factor, error = scale[shape]
        if error is None:
            return found[0] * factor, found[1]
        # A model learned from measurements may be better; NCCL's model alone has no estimate of its error.
        return found[0] * factor, min(error, found[1]) if has_learned else error

    return scaled


def _judged(
    change: JobChange,
    logged: LoggedSteps,
    before: StepProgram,
    program: StepProgram,
    policies: Mapping[str, Policy],
    context: PolicyContext,
    counts: Mapping[Shape, int],
    assumptions: Sequence[str],
) -> WhatIf:
    is_other_stage = change.stage is not None and with_stage(before, change.stage) != before
    doubt = STAGE_DOUBT if is_other_stage else 0.0
    priced = {shape: context.estimates.estimate(shape, BASELINE) for shape in counts}
    costs_us = {shape: found.cost_us for shape, found in priced.items() if found is not None}
    weights = [count * costs_us.get(shape, 0.0) for shape, count in counts.items()]
    judged = judge(counts, weights, policies, context)
    channels = {shape: _channels_like(shape, logged.channels) for shape in counts}
    program = _priced(program, before, costs_us, channels)
    step = correction(before, logged.facts)(steady_step(program))
    facts = msgspec.structs.replace(logged.facts, step_us=step.step_us, exposed_us=step.exposed_us)
    assert logged.model is not None
    changed = logged._replace(facts=facts, model=replace(logged.model, program=program), channels=channels)
    estimates, refusals = step_estimates(changed, judged, sum(weights), logged.facts)
    return WhatIf(
        change=str(change),
        logged_step_us=logged.facts.step_us,
        n_collectives=len(program.calls),
        communication_bytes=sum(call.shape.message_bytes for call in program.calls),
        compute_us=program.compute_us,
        totals=tuple(one.total for one in judged),
        step_estimates=tuple(_doubted(one, doubt) for one in estimates),
        step_refusals=tuple(refusals),
        assumptions=tuple(assumptions),
    )


def _doubted(estimate: StepEstimate, doubt: float) -> StepEstimate:
    """Widen the interval of the step time, but not that of the change between policies."""
    return msgspec.structs.replace(
        estimate, low_us=estimate.low_us / (1 + doubt), high_us=estimate.high_us * (1 + doubt)
    )


def _priced(
    program: StepProgram, before: StepProgram, costs_us: Mapping[Shape, float], channels: Mapping[Shape, int]
) -> StepProgram:
    """`program` under NCCL's own choice, whatever the job was logged under.

    Places of the step at which a shape takes longer keep their ratio. A collective without evidence gets the logged
    time for its bytes, which counts only in the refused share.
    """
    usual_us = usual_durations(replace(program, calls=tuple(call for call in program.calls if call.logged_us > 0)))
    us_per_byte = before.communication_us / sum(call.shape.message_bytes for call in before.calls)

    def priced(call: TimelineCall) -> TimelineCall:
        place = call.logged_us / usual_us[call.shape] if call.logged_us > 0 else 1.0
        cost_us = costs_us.get(call.shape, us_per_byte * call.shape.message_bytes)
        return replace(call, logged_us=place * cost_us, logged_channels=channels[call.shape])

    return replace(program, calls=tuple(map(priced, program.calls)))


def _channels_like(shape: Shape, known: Mapping[Shape, int]) -> int:
    """Channels of the logged collective that is most similar in kind and size."""

    def distance(other: Shape) -> tuple[bool, bool, float]:
        is_other = other.collective is not shape.collective, other.communicator != shape.communicator
        return *is_other, abs(math.log(other.message_bytes / shape.message_bytes))

    return known[min(known, key=distance)]
