"""What device memory allows, and rows for messages that nobody has sent yet.

Connecting an algorithm that has not run yet on a communicator costs device memory (`zerotune.agent.nccl.memory`), and
with some libraries so does every channel. Nothing is connected that would bring the pressure above a threshold. Above
it only what has run already may run, with as many channels or fewer: that takes no memory of either kind of library,
and nothing is given back by using less of it.

While memory is short, a message of a new size must not make NCCL connect what the device has no room for: every size
that was not seen gets a setting that is connected already, the cheapest by NCCL's costs. When memory becomes free,
larger batches and buckets usually follow: what runs at the largest messages runs at the sizes just above, too, where
NCCL's own choice stays the same and NCCL's costs leave something of the gain that was measured. Other sizes are left to
NCCL. What is guessed is verified once it runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zerotune.agent.nccl import memory
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
from zerotune.tuner.learning.policy.keys import Family, KeyState
from zerotune.tuner.learning.policy.observations import CallEvidence
from zerotune.tuner.learning.policy.surrogate import Surrogate
from zerotune.tuner.modeling.features import cell_of

RELEASE: Final = 0.02
"""Memory counts as short until the pressure is so far below the threshold: no flapping at its edge."""
PROMISE_READINGS: Final = 100
"""What was to be connected and has not run for this many readings of the pressure is not waited for."""
MORE_CHANNELS_GAIN: Final = 0.01
"""What more channels than now must gain (log) beyond what any change must, while memory is short."""
N_READINGS: Final = 256
"""Calls are told later than steps."""
DROP: Final = 0.1
"""Fall of the pressure below its recent peak after which larger messages are expected."""


class MemoryGate:
    """Told what runs and how full the device is; asked before anything new is tried."""

    def __init__(self, threshold: float, fabric: Mapping[str, str | int | float | bool] | None = None) -> None:
        facts = fabric or {}
        self._threshold = threshold
        self._device_mb = _number(facts.get("device_mb"))
        self._channel_mb = _number(facts.get("channel_mb"))
        self._pressure = 0.0
        self._fuller = 0.0
        """By how much another rank's device was fuller than rank 0's, whose steps are told, when last seen."""
        self._fullest = -1, 0.0
        """The fullest device of all ranks, as their calls tell it, and the step of that."""
        self._readings: deque[tuple[int, float]] = deque(maxlen=N_READINGS)
        self._peak = 0.0
        self._connected: dict[CommunicatorClass, dict[Algorithm, int]] = {}
        self._heard: set[int] = set()
        self._promised: dict[tuple[CommunicatorClass, Algorithm], tuple[float, int]] = {}
        """What is to be connected soon: the share of memory that it takes, and the reading by which it has run."""
        self._n_readings = 0
        self.is_short = False
        """Whether nothing new may be connected."""
        self.is_falling = False
        """Whether memory became free since it was last short, or since the pressure's last peak."""

    @property
    def pressure(self) -> float:
        """Device memory in use, 0 to 1, on the rank with the fullest device, as last heard."""
        return min(1.0, self._pressure + self._fuller)

    def heard(self, pressure: float, step: int) -> None:
        """Rank 0's device was so full at the end of `step`."""
        self._pressure = pressure
        self._readings.append((step, pressure))
        self._n_readings += 1
        fullest_step, fullest = self._fullest
        then = next((reading for at, reading in reversed(self._readings) if at <= fullest_step), math.inf)
        self._fuller = max(0.0, fullest - then)
        pressure, was_short = self.pressure, self.is_short
        if pressure > self._threshold:
            self.is_short = True
        elif pressure < self._threshold - RELEASE:
            self.is_short = False
        if self.is_short or pressure >= self._peak:
            self._peak, self.is_falling = max(pressure, self._peak), self.is_falling and not self.is_short
        if not self.is_short and (was_short or pressure < self._peak - DROP):
            self._peak, self.is_falling = pressure, True

    def ran(self, block: npt.NDArray[np.void]) -> list[int]:
        """Learn from measurements (MEASUREMENT_FIELDS) what is connected and how full the fullest device is.

        Returns the indices of those that connected something. One communicator of each kind is known. More channels of
        what has run connect nothing in NCCL.
        """
        step = int(block["step"].max())
        fullest = float(np.fmax.reduce(block["memory_pressure"][block["step"] == step]))
        if math.isfinite(fullest) and step >= self._fullest[0]:
            self._fullest = step, fullest
        codes = block["n_ranks"].astype(np.int64) << 40 | block["n_nodes"].astype(np.int64) << 16
        codes |= block["algorithm"].astype(np.int64) << 8
        codes |= block["n_channels"]
        connecting: dict[tuple[CommunicatorClass, Algorithm], int] = {}
        for code in set(np.unique(codes).tolist()) - self._heard:
            self._heard.add(code)
            communicator = CommunicatorClass(code >> 40, code >> 16 & 0xFFFFFF)
            if code >> 8 & 0xFF in _ALGORITHMS:
                own, algorithm = self._connected.setdefault(communicator, {}), Algorithm(code >> 8 & 0xFF)
                what = communicator, algorithm
                if algorithm not in own or what in connecting:
                    first = int(np.argmax(codes == code))
                    connecting[what] = min(first, connecting.get(what, first))
                own[algorithm] = max(own.get(algorithm, 0), code & 0xFF)
                self._promised.pop(what, None)
        return [*connecting.values()]

    def connected(self) -> Iterator[tuple[CommunicatorClass, Mapping[Algorithm, int]]]:
        """What has run on each kind of communicator, with the most channels."""
        yield from self._connected.items()

    def has_room_for(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether `candidate` needs nothing but what is connected already."""
        if candidate.algorithm is None:
            return False
        n_channels = self._connected.get(communicator, {}).get(candidate.algorithm, 0)
        return 0 < candidate.n_channels <= n_channels

    def allows(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether `candidate` may run."""
        algorithm, own = candidate.algorithm, self._connected.get(communicator, {})
        if self.is_short:
            return self.has_room_for(candidate, communicator)
        return algorithm is None or algorithm in own or self._may_connect(algorithm, communicator, own)

    def allows_all(self, settings: Collection[tuple[Candidate, CommunicatorClass]]) -> bool:
        """Whether all of these may run from one plan on."""
        new = {
            (communicator, candidate.algorithm): self._share(
                candidate.algorithm, communicator, self._connected.get(communicator, {})
            )
            for candidate, communicator in settings
            if candidate.algorithm is not None and not self.is_connected(candidate, communicator)
        }
        fits = not new or self._booked(*new) + sum(new.values()) <= self._threshold
        return fits and all(self.allows(*one) for one in settings)

    def promise(self, candidate: Candidate, communicator: CommunicatorClass) -> None:
        """`candidate` runs from the next plan on: what it connects is no longer free for others."""
        algorithm, own = candidate.algorithm, self._connected.get(communicator, {})
        if algorithm is not None and algorithm not in own:
            share = self._share(algorithm, communicator, own)
            self._promised[communicator, algorithm] = share, self._n_readings + PROMISE_READINGS

    @property
    def is_overbooked(self) -> bool:
        """What is to be connected soon does not fit any more."""
        return bool(self._promised) and (self.is_short or self._booked() > self._threshold)

    def take_back(self) -> None:
        """Nothing is to be connected."""
        self._promised.clear()

    def is_connected(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether its algorithm has run."""
        return candidate.algorithm in self._connected.get(communicator, {})

    def least_gain(self, options: Sequence[Candidate], n_channels_now: int) -> npt.NDArray[np.float64]:
        """What each option must gain (log) for memory's sake: while it is short fewer channels are preferred."""
        if not self.is_short:
            return np.zeros(len(options))
        return MORE_CHANNELS_GAIN * np.array([option.n_channels > n_channels_now for option in options], np.float64)

    def _may_connect(self, algorithm: Algorithm, communicator: CommunicatorClass, own: Mapping[Algorithm, int]) -> bool:
        if (communicator, algorithm) in self._promised:
            return True
        self._promised = {what: one for what, one in self._promised.items() if one[1] > self._n_readings}
        return self._booked() + self._share(algorithm, communicator, own) <= self._threshold

    def _booked(self, *besides: tuple[CommunicatorClass, Algorithm]) -> float:
        """Memory that is in use or promised, the latter but for some."""
        return self.pressure + sum(share for what, (share, _) in self._promised.items() if what not in besides)

    def _share(self, algorithm: Algorithm, communicator: CommunicatorClass, own: Mapping[Algorithm, int]) -> float:
        """Part of the device's memory that connecting an algorithm would take; 0 where its memory is not known."""
        if self._device_mb <= 0:
            return 0.0
        n_channels = max(own.values(), default=_USUAL_CHANNELS)
        if self._channel_mb > 0:
            taken_mb = n_channels * self._channel_mb * memory.n_neighbours(algorithm, communicator)
        else:
            taken_mb = memory.connection_mb(algorithm, communicator, n_channels)
        return taken_mb / self._device_mb


def _number(fact: str | int | float | bool | None) -> float:
    return float(fact) if isinstance(fact, int | float) else 0.0


_USUAL_CHANNELS: Final = 16
_ALGORITHMS: Final = frozenset(int(member) for member in Algorithm)


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
