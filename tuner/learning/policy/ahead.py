"""Rows for messages that nobody has sent yet, so that a plan is there before their first.

While memory is short, a message of a new size must not make NCCL connect what the device has no room for:
every size that was not seen gets a setting that is connected already. When memory becomes free, larger
batches and buckets usually follow: the sizes just above the largest ones get what is surely faster than NCCL's own
choice there, as far as what ran at the largest ones tells. Where that is not clear they are left to NCCL. What is
guessed is verified once it runs.
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
from zerotune.tuner.learning.policy.evidence.evidence import Evidence
from zerotune.tuner.learning.policy.evidence.outlook import Outlook
from zerotune.tuner.learning.policy.memory import MemoryGate
from zerotune.tuner.learning.policy.trials.trial import Family, KeyState
from zerotune.tuner.modeling.features import cell_of

MAX_ROWS: Final = 90
"""A plan table holds 4096 rows, of which the keys may take 4000."""
MAX_OPINIONS: Final = 32
"""Posteriors worked out in one go, for nearer sizes first: bounds the time of one call."""
OCTAVES_AHEAD: Final = 2
"""Octaves above the largest message seen that get rows when memory becomes free."""
OCTAVES_GUARDED: Final = 4
"""Octaves that get rows when memory is short; the last row has no upper end."""
SMALLEST_CLASS: Final = 3 * SIZE_CLASSES_PER_OCTAVE
"""Eight bytes: below, several classes begin at the same size."""
LARGEST_CLASS: Final = 47 * SIZE_CLASSES_PER_OCTAVE
DOUBTS: Final = (0.3, 0.4)
"""Standard deviations that are taken off the expected gain of a setting measured at the largest messages, in the first
octave above and the second: what is left must still be a gain.
"""
DOUBT_UNTRIED: Final = 0.8
"""Standard deviations taken off for other channel counts of an algorithm and protocol that ran there. Algorithms and
protocols that never ran there are not guessed.
"""
TRIED_UNITS: Final = 2
"""Steps of evidence from which on a setting counts as measured."""
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


class _Opinion(NamedTuple):
    options: tuple[Candidate, ...]
    mean: np.ndarray


class Ahead:
    """Makes the rows anew when memory or the keys have changed; `rows` are those that hold now."""

    def __init__(self, memory: MemoryGate, outlook: Outlook, min_gain: float, *, may_try: bool = True) -> None:
        self._memory = memory
        self._outlook = outlook
        self._min_gain = min_gain
        self._may_try = may_try
        """Whether what is only predicted to be faster may run."""
        self._made_for: tuple[object, ...] = ()
        self._n_known = 0
        self._largest: list[KeyState] = []
        """The keys of the largest messages, as long as no new ones come."""
        self.rows: tuple[PlanRow, ...] = ()

    def refresh(self, states: list[KeyState], evidence: Evidence) -> bool:
        """Bring the rows up to date; whether they changed."""
        memory = self._memory
        if not (memory.is_short or memory.is_falling or self.rows):
            return False
        connected = {shape: dict(own) for shape, own in memory.connected()}
        if len(states) != self._n_known:
            self._n_known, self._largest = len(states), _largest(states)
        found = [(state.usual, len(state.banned), len(_tried(state, evidence))) for state in self._largest]
        depends_on = connected if memory.is_short else found
        known = self._outlook.fields.follow()
        situation = memory.is_short, memory.is_falling, len(states), depends_on, known
        if situation == self._made_for:
            return False
        self._made_for = situation
        before = self.rows
        if memory.is_short:
            self.rows = self._guards(states, evidence, connected)
        else:
            self.rows = self._next_ones(self._largest, states, evidence) if memory.is_falling and self._may_try else ()
        return [_setting(row) for row in before] != [_setting(row) for row in self.rows]

    def _guards(
        self, states: list[KeyState], evidence: Evidence, connected: Mapping[CommunicatorClass, Mapping[Algorithm, int]]
    ) -> tuple[PlanRow, ...]:
        opinions: dict[tuple[Family, Span], Candidate | None] = {}
        rows: list[PlanRow] = []
        seen = _seen(states)
        # What is called most was seen first, and has the first claim on rows.
        for communicator in connected:
            for collective in TUNABLE:
                for phase in PHASES[collective]:
                    classes = seen.get((communicator, collective, phase), [])
                    spans = [span for gap in _gaps(classes) for span in _split(gap, bool(classes))]
                    for span in spans:
                        name = ((communicator, collective), span)
                        if name not in opinions:
                            opinions[name] = self._connected_best(*name, phase, states, evidence, len(opinions))
                        setting = opinions[name]
                        if setting is not None:
                            rows.append(_row(communicator, collective, phase, span, setting, SHORT))
        return _merged(rows)[:MAX_ROWS]

    def _next_ones(self, largest: list[KeyState], states: list[KeyState], evidence: Evidence) -> tuple[PlanRow, ...]:
        rows: list[list[PlanRow]] = [[] for _ in largest]
        n_opinions = 0
        for step in range(OCTAVES_AHEAD * SIZE_CLASSES_PER_OCTAVE):
            octave = step // SIZE_CLASSES_PER_OCTAVE
            for state, own in zip(largest, rows, strict=True):
                size_class, setting = state.key.size_class + 1 + step, BASELINE
                default = self._default_of(state, size_class, is_far=octave > 0)
                if default is not None and n_opinions < MAX_OPINIONS:
                    n_opinions += 1
                    setting = self._surely_faster(state, size_class, default, DOUBTS[octave], states, evidence)
                place = state.key.communicator, state.family[1], Phase(state.key.phase)
                own.append(_row(*place, Span(size_class, size_class), setting, FREE))
        return _merged([row for own in rows for row in own])[:MAX_ROWS]

    def _surely_faster(
        self,
        state: KeyState,
        size_class: int,
        default: Candidate,
        doubt: float,
        states: list[KeyState],
        evidence: Evidence,
    ) -> Candidate:
        """What should be faster than `default`, NCCL's own choice at a larger size, even if less so than expected."""
        tried = _tried(state, evidence)
        ran = {cell_of(one) for one in (*tried, state.default_setting) if one is not None and not one.is_baseline}
        if cell_of(default) not in ran:
            return BASELINE
        nobody = KeyState(
            _NO_INDEX, DecisionKey(*state.family, state.key.phase, size_class), float(_centre(size_class))
        )
        nobody.default_setting = default
        gains, spreads = self._outlook.gains(nobody, states, evidence)
        promised = self._promises(state, _centre(size_class), default, evidence)
        best, most = BASELINE, self._min_gain
        for option, gain, spread in zip(
            self._outlook.fields.of(nobody).options, gains.tolist(), spreads.tolist(), strict=True
        ):
            if cell_of(option) not in ran or option in state.banned or option.n_channels > state.max_channels:
                continue
            if option == state.usual and math.isfinite(promised):
                gain = 0.5 * (gain + promised)
            gain -= (doubt if option in tried else DOUBT_UNTRIED) * spread
            if gain > most and self._memory.allows(option, state.key.communicator):
                best, most = option, gain
        return best

    def _default_of(self, state: KeyState, size_class: int, *, is_far: bool) -> Candidate | None:
        """What NCCL should choose by itself for messages of a larger class.

        None where that is not known, or where it changes the algorithm or protocol within the class: what is faster
        than the one may be slower than the other.
        """
        ends = size_class_floor(size_class), size_class_floor(size_class + 1) - 1
        first, last = (self._default_at(state, end, is_far=is_far) for end in ends)
        if first is None or last is None or cell_of(first) != cell_of(last):
            return None
        return self._default_at(state, _centre(size_class), is_far=is_far)

    def _default_at(self, state: KeyState, message_bytes: int, *, is_far: bool = False) -> Candidate | None:
        """What NCCL should choose by itself for larger messages; None where nothing says.

        Without a description of the hardware there are the cost tables of smaller messages only, or what ran at
        these: neither tells of a choice that changes, so nothing is known of what is far.
        """
        costs = self._outlook.fields.costs
        described = costs.default(*state.family, message_bytes, described_only=True)
        if described is not None or is_far:
            return described
        own = state.default_setting
        found = costs.default(*state.family, message_bytes) or own
        if found is None or found.n_channels:
            return found
        is_own = own is not None and cell_of(own) == cell_of(found)
        n_channels = own.n_channels if own is not None and is_own else costs.max_channels(state.family[0])
        return Candidate(found.algorithm, found.protocol, n_channels)

    def _promises(self, state: KeyState, message_bytes: int, default: Candidate, evidence: Evidence) -> float:
        """By how much (log) what runs at a key should be faster than `default`, NCCL's choice at a larger size.

        As much as was measured at the key's own size, less the difference that NCCL's costs of both sizes make. NaN
        where that is not known, and where NCCL chooses another algorithm or protocol there, which was not measured.
        """
        slots = evidence.find(state.index, BASELINE), evidence.find(state.index, state.usual)
        own_default = self._default_at(state, int(state.message_bytes))
        if slots[0] is None or slots[1] is None or own_default is None or cell_of(own_default) != cell_of(default):
            return math.nan
        costs = self._outlook.fields.costs
        own, own_usual = costs.log_cost(*state.family, (own_default, state.usual), state.message_bytes)[0].tolist()
        next_, next_usual = costs.log_cost(*state.family, (default, state.usual), message_bytes)[0].tolist()
        measured = evidence.log_us(slots[0]) - evidence.log_us(slots[1])
        return float(measured + min(0.0, next_ - next_usual - (own - own_usual)))

    def _connected_best(
        self, family: Family, span: Span, phase: Phase, states: list[KeyState], evidence: Evidence, n_before: int
    ) -> Candidate | None:
        """The fastest setting that connects nothing; of nearly equals the one with the fewest channels."""
        communicator, collective = family
        if n_before < MAX_OPINIONS:
            options, mean = self._opinion(family, span, phase, states, evidence)
        else:
            options = self._outlook.fields.costs.candidates(*family)
            sizes = np.array([float(_middle(span))])
            mean = self._outlook.fields.costs.log_cost(communicator, collective, options, sizes)[0]
        usable = [
            (float(mean[at]), option)
            for at, option in enumerate(options)
            if math.isfinite(mean[at]) and self._memory.has_room_for(option, communicator)
        ]
        if not usable:
            return None
        lowest = min(log_us for log_us, _ in usable)
        near = [(option.n_channels, log_us, option) for log_us, option in usable if log_us <= lowest + SMALLER_COSTS]
        return min(near)[2]

    def _opinion(
        self, family: Family, span: Span, phase: Phase, states: list[KeyState], evidence: Evidence
    ) -> _Opinion:
        middle = _middle(span)
        nobody = KeyState(_NO_INDEX, DecisionKey(*family, phase, (span.first + span.last) // 2), float(middle))
        mean, _ = self._outlook.posterior(nobody, states, evidence)
        return _Opinion(self._outlook.fields.of(nobody).options, mean)


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


def _tried(state: KeyState, evidence: Evidence) -> set[Candidate]:
    """What was measured at a key."""
    slots = evidence.slots_of(state.index)
    return {evidence.candidates[slot] for slot in slots if evidence.units(slot) >= TRIED_UNITS}


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
