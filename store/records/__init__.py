"""Frozen records and enumerations that every part of zerotune shares; import them from here.

Units are suffixes: `_bytes`, `_us` (microseconds), `_ns`, `_s` (seconds since the epoch).
"""

from __future__ import annotations

from .decision import OF_JOB, Decision, DecisionKind
from .job import Exposure, HowKnown, JobRecord, MissingEvidence, ModelRecord, Stage
from .keys import (
    SIZE_CLASSES_PER_OCTAVE,
    DecisionKey,
    Phase,
    SizeClass,
    phase_name,
    size_class,
    size_class_floor,
    size_class_range,
)
from .measured import LEAST_US, CandidateStatistics, Observation, Outcome, Source, StepRecord, TimingSource
from .nccl import (
    BASELINE,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Protocol,
)
from .numbers import U32, MessageBytes, Micros, Ordinal, Pressure, Text
from .plan import MAX_STAGES, NextStage, Plan, PlanRow

__all__ = [
    "BASELINE",
    "LEAST_US",
    "MAX_CHUNK_BYTES",
    "MAX_STAGES",
    "MIN_CHUNK_BYTES",
    "OF_JOB",
    "SIZE_CLASSES_PER_OCTAVE",
    "U32",
    "Algorithm",
    "Candidate",
    "CandidateStatistics",
    "Collective",
    "CommunicatorClass",
    "Decision",
    "DecisionKey",
    "DecisionKind",
    "Exposure",
    "HowKnown",
    "JobRecord",
    "MessageBytes",
    "Micros",
    "MissingEvidence",
    "ModelRecord",
    "NextStage",
    "Observation",
    "Ordinal",
    "Outcome",
    "Phase",
    "Plan",
    "PlanRow",
    "Pressure",
    "Protocol",
    "SizeClass",
    "Source",
    "Stage",
    "StepRecord",
    "Text",
    "TimingSource",
    "phase_name",
    "size_class",
    "size_class_floor",
    "size_class_range",
]
