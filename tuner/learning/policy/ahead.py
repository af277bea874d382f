"""Rows for messages that nobody has sent yet, so that a plan is there before their first.

While memory is short, a message of a new size must not make NCCL connect what the device has no room for:
every size that was not seen gets a setting that is connected already, the cheapest by NCCL's costs. When memory becomes
free, larger batches and buckets usually follow: what runs at the largest messages runs at the sizes just above, too,
where NCCL's own choice stays the same and NCCL's costs leave something of the gain that was measured. Other sizes are
left to NCCL. What is guessed is verified once it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from zerotune.agent.nccl.catalog import TUNABLE
from zerotune.store.records import (
    BASELINE,
    SIZE_CLASSES_PER_OCTAVE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    PlanRow,
    size_class_floor,
)
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.evidence.surrogate import Surrogate
from zerotune.tuner.learning.policy.memory import MemoryGate
from zerotune.tuner.learning.policy.trials.trial import Family, KeyState
from zerotune.tuner.modeling.features import cell_of

MAX_ROWS: Final = 90
"""A plan table holds 4096 rows, of which the keys may take 4000."""
OCTAVES_AHEAD: Final = 2
"""Octaves above the largest message seen that get rows when memory becomes free."""
OCTAVES_GUARDED: Final = 4
"""Octaves that get rows when memory is short; the last row has no upper end."""
SMALLEST_CLASS: Final = 3 * SIZE_CLASSES_PER_OCTAVE
"""Eight bytes: below, several classes begin at the same size."""
LARGEST_CLASS: Final = 47 * SIZE_CLASSES_PER_OCTAVE
LOST_PER_OCTAVE: Final = 0.1
"""Gain (log) that may be lost from one octave to the next besides what NCCL's costs say."""
SMALLER_COSTS: Final = 0.01
"""Slowdown (log) for which fewer channels are preferred while memory is short."""
PHASES: Final[Mapping[Collective, tuple[Phase, ...]]] = {
    Collective.all_gather: (Phase.forward_gather, Phase.backward_gather, Phase.post_step_gather, Phase.other),
    Collective.reduce_scatter: (Phase.gradient_scatter, Phase.other),
    Collective.all_reduce: (Phase.gradient_scatter, Phase.other),
}
"""What the plugin can tell apart."""


class Span(NamedTuple):
    """Size classes that no message was seen of, both ends inclusive."""

    first: int
    last: int


class Ahead:
    """Makes the rows anew when memory or the keys have changed; `rows` are those that hold now."""

    def __init__(self, memory: MemoryGate, surrogate: Surrogate, min_gain: float, *, may_try: bool = True) -> None:
        self._memory = memory
        self._surrogate = surrogate
        self._min_gain = min_gain
        self._may_try = may_try
        """Whether what is only predicted to be faster may run."""
        self._made_for: tuple[object, ...] = ()
        self._n_known = 0
        self._largest: list[KeyState] = []
        """The keys of the largest messages, as long as no new ones come."""
        self.rows: tuple[PlanRow, ...] = ()

    def refresh(self, states: list[KeyState], evidence: CallEvidence) -> bool:
        """Bring the rows up to date; whether they changed."""
        memory = self._memory
        if not (memory.is_short or memory.is_falling or self.rows):
            return False
        connected = {shape: dict(own) for shape, own in memory.connected()}
        if len(states) != self._n_known:
            self._n_known, self._largest = len(states), _largest(states)
        depends_on = connected if memory.is_short else [state.usual for state in self._largest]
        situation = memory.is_short, memory.is_falling, len(states), depends_on, self._surrogate.fields.follow()
        if situation == self._made_for:
            return False
        self._made_for = situation
        before = self.rows
        if memory.is_short:
            self.rows = self._guards(states, connected)
        else:
            self.rows = self._carried(evidence) if memory.is_falling and self._may_try else ()
        return [_setting(row) for row in before] != [_setting(row) for row in self.rows]

    def _guards(
        self, states: list[KeyState], connected: Mapping[CommunicatorClass, Mapping[Algorithm, int]]
    ) -> tuple[PlanRow, ...]:
        rows: list[PlanRow] = []
        seen = _seen(states)
        # What is called most was seen first, and has the first claim on rows.
        for communicator in connected:
            for collective in TUNABLE:
                for phase in PHASES[collective]:
                    classes = seen.get((communicator, collective, phase), [])
                    for span in (span for gap in _gaps(classes) for span in _split(gap, bool(classes))):
                        setting = self._connected_best((communicator, collective), span)
                        if setting is not None:
                            rows.append(_row(communicator, collective, phase, span, setting, SHORT))
        return _merged(rows)[:MAX_ROWS]

    def _connected_best(self, family: Family, span: Span) -> Candidate | None:
        """The cheapest setting that connects nothing; of nearly equals the one with the fewest channels."""
        costs = self._surrogate.fields.costs
        options = [one for one in costs.candidates(*family) if self._memory.has_room_for(one, family[0])]
        log_us = costs.log_cost(*family, options, float(_middle(span)))[0].tolist()
        usable = [(us, option) for us, option in zip(log_us, options, strict=True) if math.isfinite(us)]
        if not usable:
            return None
        lowest = min(us for us, _ in usable)
        return min((option.n_channels, us, option) for us, option in usable if us <= lowest + SMALLER_COSTS)[2]

    def _carried(self, evidence: CallEvidence) -> tuple[PlanRow, ...]:
        rows: list[PlanRow] = []
        for state in self._largest:
            first = state.key.size_class + 1
            for size_class in range(first, first + OCTAVES_AHEAD * SIZE_CLASSES_PER_OCTAVE):
                setting = state.usual if self._gain(state, size_class, evidence) > self._min_gain else BASELINE
                place = state.key.communicator, state.family[1], Phase(state.key.phase)
                rows.append(_row(*place, Span(size_class, size_class), setting, FREE))
        return _merged(rows)[:MAX_ROWS]

    def _gain(self, state: KeyState, size_class: int, evidence: CallEvidence) -> float:
        """By how much (log) what runs at a key should be faster than NCCL's own choice in a larger size class.

        As much as was measured at the key, less what NCCL's costs of both sizes and the distance take of it. NaN where
        that is not known, and where NCCL chooses another algorithm or protocol, beside which nothing was measured.
        """
        costs, usual = self._surrogate.fields.costs, state.usual
        slots = evidence.find(state.index, BASELINE), evidence.find(state.index, usual)
        ends = size_class_floor(size_class), size_class_floor(size_class + 1) - 1
        sizes = int(state.message_bytes), *ends
        defaults = [costs.default(*state.family, size, described_only=True) for size in sizes]
        settings = [one for one in defaults if one is not None]
        if len(settings) < len(sizes) or len({cell_of(one) for one in settings}) > 1:
            return math.nan
        if slots[0] is None or slots[1] is None or not self._memory.allows(usual, state.family[0]):
            return math.nan
        log_us = costs.log_cost(*state.family, (*settings, usual), np.array(sizes, np.float64))
        here, *there = np.diagonal(log_us) - log_us[:, -1]
        octaves = math.log2(ends[1] / state.message_bytes)
        lost = max(0.0, here - min(there)) + LOST_PER_OCTAVE * octaves
        return evidence.log_us(slots[0]) - evidence.log_us(slots[1]) - float(lost)

SHORT: Final = "memory is short: nothing new is connected for sizes not seen yet"
FREE: Final = "memory became free: larger messages are expected"
_NO_INDEX: Final = 1 << 40
"""No measured key's, so that nothing is taken for this one's own."""


def covering(rows: tuple[PlanRow, ...], key: DecisionKey) -> PlanRow | None:
    """The row that a key runs under before its own is made."""
    floor, place = size_class_floor(key.size_class), (key.communicator, key.collective, key.phase)
    return next((row for row in rows if row.min_bytes <= floor <= row.max_bytes and _place(row) == place), None)


def _seen(states: list[KeyState]) -> dict[tuple[CommunicatorClass, Collective, Phase], list[int]]:
    found: dict[tuple[CommunicatorClass, Collective, Phase], list[int]] = {}
    for state in states:
        key = state.key
        if key.collective in PHASES:
            found.setdefault((key.communicator, Collective(key.collective), Phase(key.phase)), []).append(
                key.size_class
            )
    for classes in found.values():
        classes.sort()
    return found


def _largest(states: list[KeyState]) -> list[KeyState]:
    """Of each communicator's collectives, by phase, the key of the largest messages."""
    by_key = {state.key: state for state in states}
    return [by_key[DecisionKey(*place, classes[-1])] for place, classes in _seen(states).items()]


def _gaps(classes: list[int]) -> list[Span]:
    edges = [SMALLEST_CLASS - 1, *(one for one in classes if one >= SMALLEST_CLASS), LARGEST_CLASS + 1]
    return [Span(low + 1, high - 1) for low, high in pairwise(edges) if high - low > 1]


def _split(gap: Span, is_measured: bool) -> list[Span]:
    """Octaves, since the best setting changes with the size; far from anything measured, one span is all there is."""
    if gap.last < LARGEST_CLASS or not is_measured:
        return [gap]
    starts = [gap.first + octave * SIZE_CLASSES_PER_OCTAVE for octave in range(OCTAVES_GUARDED)]
    starts = [start for start in starts if start <= gap.last]
    return [Span(start, following - 1) for start, following in zip(starts, [*starts[1:], gap.last + 1], strict=True)]


def _middle(span: Span) -> int:
    """A size that stands for the span: its middle, or near its lower end where it has no upper one."""
    if span.last >= LARGEST_CLASS:
        return size_class_floor(min(max(span.first, _A_KIB) + SIZE_CLASSES_PER_OCTAVE, LARGEST_CLASS))
    return size_class_floor((max(span.first, min(_A_KIB, span.last)) + span.last) // 2)


def _centre(size_class: int) -> int:
    return (size_class_floor(size_class) + size_class_floor(size_class + 1)) // 2


_A_KIB: Final = 10 * SIZE_CLASSES_PER_OCTAVE


def _row(
    communicator: CommunicatorClass, collective: Collective, phase: Phase, span: Span, setting: Candidate, reason: str
) -> PlanRow:
    ends = size_class_floor(span.first), size_class_floor(span.last + 1) - 1
    return PlanRow(communicator, collective, phase, *ends, setting, reason)


def _merged(rows: list[PlanRow]) -> tuple[PlanRow, ...]:
    """Neighbours that say the same become one row."""
    merged: list[PlanRow] = []
    for row in rows:
        last = merged[-1] if merged else None
        is_same = last is not None and (*_place(last), last.candidate) == (*_place(row), row.candidate)
        if last is not None and is_same and last.max_bytes + 1 == row.min_bytes:
            merged[-1] = _until(last, row.max_bytes)
        else:
            merged.append(row)
    return tuple(merged)


def _place(row: PlanRow) -> tuple[CommunicatorClass, Collective, Phase]:
    return row.communicator, row.collective, row.phase


def _until(row: PlanRow, max_bytes: int) -> PlanRow:
    return PlanRow(*_place(row), row.min_bytes, max_bytes, row.candidate, row.reason, row.model_id)


def _setting(row: PlanRow) -> tuple[object, ...]:
    return *_place(row), row.min_bytes, row.max_bytes, row.candidate
