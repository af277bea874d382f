"""Decides which settings device memory allows, and makes plan rows for message sizes not seen yet.

An algorithm's first connection on a communicator takes device memory (`zerotune.agent.nccl.memory`), and with some
libraries each channel does, too. NCCL never frees it. So nothing is connected that would raise the pressure above a
threshold. Above the threshold only algorithms that ran already may run, with as many channels or fewer.

While memory is short, a new message size must not make NCCL connect anything. Every size not seen yet gets the cheapest
setting, by NCCL's costs, that is connected already. When memory becomes free, larger batches and buckets usually
follow. The setting of the largest messages then runs at the sizes just above, too. Conditions are that NCCL's own
choice stays the same, and that NCCL's costs leave a part of the measured gain. NCCL chooses at all other sizes.
Predicted settings are verified once they run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from ....agent.nccl import memory
from ....agent.nccl.catalog import TUNABLE
from ....store.records import (
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
from ...modeling.features import cell_of
from .keys import Family, KeyState
from .observations import HORIZON_STEPS, MIN_GAIN
from .surrogate import Surrogate

RELEASE: Final = 0.02
"""Hysteresis: memory counts as short until the pressure is this far below the threshold."""
DROP: Final = 0.1
"""Fall of the pressure below its recent peak after which larger messages are expected."""
USUAL_CHANNELS: Final = 16
"""Channels that a connection is assumed to have as long as nothing has run."""
_ALGORITHMS: Final = frozenset(int(member) for member in Algorithm)


class MemoryGate:
    """Knows the connected algorithms and how full the devices are; asked before a new setting is tried."""

    def __init__(self, threshold: float, fabric: Mapping[str, str | int | float | bool] | None = None) -> None:
        self._threshold = threshold
        self._device_mb, self._channel_mb = (
            float(fact) if isinstance(fact, int | float) else 0.0
            for fact in ((fabric or {}).get(name) for name in ("device_mb", "channel_mb"))
        )
        self._of_rank_0 = 0.0
        self._fullest = 0.0
        """The pressure on the fullest device of all ranks, from their last calls."""
        self._peak = 0.0
        self.connected: dict[CommunicatorClass, dict[Algorithm, int]] = {}
        """Algorithms that ran on each communicator class, with their most channels."""
        self._met_channels: set[int] = set()
        self._met: set[int] = set()
        """Codes of calls that ran: `_met_channels` with channels, `_met` without."""
        self._promised: dict[tuple[CommunicatorClass, Algorithm], int] = {}
        """Connections that a plan will make, and the number of the pressure reading at which the wait for each ends."""
        self._n_readings = 0
        self.is_short = False
        """Whether nothing new may be connected."""
        self.is_falling = False
        """Whether memory became free since the pressure's last peak."""

    @property
    def pressure(self) -> float:
        """Device memory in use, 0 to 1, on the rank with the fullest device, by the last reading."""
        return max(self._of_rank_0, self._fullest)

    def take_reading(self, pressure: float) -> None:
        """Take in the pressure on rank 0's device at the end of a step."""
        self._of_rank_0, self._n_readings = pressure, self._n_readings + 1
        self._promised = {what: until for what, until in self._promised.items() if until > self._n_readings}
        if self.pressure > self._threshold:
            self.is_short = True
        elif self.pressure < self._threshold - RELEASE:
            self.is_short = False
        self._peak = max(self.pressure, self._peak)
        if self.is_short:
            self.is_falling = False
        elif self.pressure < self._peak - DROP:
            self._peak, self.is_falling = self.pressure, True

    def filled(self, block: npt.NDArray[np.void]) -> None:
        """Learn from calls, shape [n], how full the fullest device was in their latest step."""
        fullest = float(np.fmax.reduce(block["memory_pressure"][block["step"] == block["step"].max()]))
        if math.isfinite(fullest):
            self._fullest = fullest

    def ran(self, block: npt.NDArray[np.void]) -> list[int]:
        """Learn from MEASUREMENT_FIELDS which algorithms are connected and how full the fullest device is.

        Returns the indices of calls that may have connected something: the first call of each algorithm, collective and
        phase, as a phase may have its own communicator. More channels of a connected algorithm connect nothing in NCCL.
        """
        self.filled(block)
        codes = block["n_ranks"].astype(np.int64) << 44 | block["n_nodes"].astype(np.int64) << 24
        codes |= (block["collective"].astype(np.int64) & 15) << 20 | (block["phase"].astype(np.int64) & 15) << 16
        codes |= block["algorithm"].astype(np.int64) << 8
        codes |= block["n_channels"]
        connecting: dict[int, int] = {}
        for code in set(codes.tolist()) - self._met_channels:
            self._met_channels.add(code)
            communicator = CommunicatorClass(code >> 44, code >> 24 & 0xFFFFF)
            if code >> 8 & 0xFF in _ALGORITHMS:
                own, algorithm = self.connected.setdefault(communicator, {}), Algorithm(code >> 8 & 0xFF)
                what, first = code >> 8, int(np.argmax(codes == code))
                if what not in self._met:
                    connecting[what] = min(first, connecting.get(what, first))
                own[algorithm] = max(own.get(algorithm, 0), code & 0xFF)
                self._promised.pop((communicator, algorithm), None)
        self._met |= connecting.keys()
        return [*connecting.values()]

    def is_connected(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether the candidate's algorithm has run on the communicator class."""
        return candidate.algorithm in self.connected.get(communicator, {})

    def has_room_for(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether `candidate` needs no new connection."""
        if candidate.algorithm is None:
            return False
        return 0 < candidate.n_channels <= self.connected.get(communicator, {}).get(candidate.algorithm, 0)

    def allows(self, candidate: Candidate, communicator: CommunicatorClass) -> bool:
        """Whether `candidate` may run."""
        return self.allows_all([(candidate, communicator)])

    def allows_all(self, settings: Collection[tuple[Candidate, CommunicatorClass]]) -> bool:
        """Whether one plan may request all of these."""
        if self.is_short:
            return all(self.has_room_for(*one) for one in settings)
        new = {
            (communicator, candidate.algorithm)
            for candidate, communicator in settings
            if candidate.algorithm is not None and not self.is_connected(candidate, communicator)
        }
        return new <= self._promised.keys() or self._booked({*new, *self._promised}) <= self._threshold

    def promise(self, candidate: Candidate, communicator: CommunicatorClass) -> None:
        """Set aside the memory that `candidate` will connect under the next plan."""
        if candidate.algorithm is not None and not self.is_connected(candidate, communicator):
            self._promised[communicator, candidate.algorithm] = self._n_readings + HORIZON_STEPS

    @property
    def is_overbooked(self) -> bool:
        """Whether the memory set aside no longer fits."""
        return bool(self._promised) and (self.is_short or self._booked(self._promised) > self._threshold)

    def take_back(self) -> None:
        """Set nothing aside any more."""
        self._promised.clear()

    def _booked(self, new: Collection[tuple[CommunicatorClass, Algorithm]]) -> float:
        """Memory in use plus the memory for these connections, as a share; without the latter if that is unknown."""
        return self.pressure + sum(self._taken_mb(*one) / self._device_mb for one in new if self._device_mb > 0)

    def _taken_mb(self, communicator: CommunicatorClass, algorithm: Algorithm) -> float:
        n_channels = max(self.connected.get(communicator, {}).values(), default=USUAL_CHANNELS)
        if self._channel_mb > 0:
            return n_channels * self._channel_mb * memory.n_neighbours(algorithm, communicator)
        return memory.connection_mb(algorithm, communicator, n_channels)


MAX_ROWS: Final = 90
"""A plan table holds 4096 rows, of which the keys may take 4000."""
OCTAVES_AHEAD: Final = 2
"""Octaves above the largest message seen that get rows when memory becomes free."""
LOST_PER_OCTAVE: Final = 0.1
"""Gain (log) that may be lost per octave beyond NCCL's costs."""
OCTAVES: Final = range(3, 48)
"""Octaves that get rows: from eight bytes on; below, several size classes begin at the same size."""
SHORT: Final = "memory is short: nothing new is connected for sizes not seen yet"
FREE: Final = "memory became free: larger messages are expected"


class UnseenSizeRules:
    """Makes the rows anew if memory or the keys have changed; `rows` are in force now."""

    def __init__(self, memory: MemoryGate, surrogate: Surrogate, *, may_try: bool = True) -> None:
        self._memory = memory
        self._surrogate, self._tables = surrogate, surrogate.tables
        self._may_try = may_try
        """Whether settings that are only predicted to be faster may run."""
        self._made_for: tuple[object, ...] = ()
        self.rows: tuple[PlanRow, ...] = ()

    def refresh(self) -> bool:
        """Bring the rows up to date; return whether they changed."""
        memory, states = self._memory, self._tables.states
        if not (memory.is_short or memory.is_falling or self.rows):
            return False
        connected = {shape: dict(own) for shape, own in memory.connected.items()}
        depends_on = [state.usual for state in states] if memory.is_falling else connected
        situation = memory.is_short, memory.is_falling, len(states), depends_on, self._tables.follow()
        if situation == self._made_for:
            return False
        self._made_for, before = situation, self.rows
        rows: Iterator[PlanRow] = iter(())
        if memory.is_short:
            rows = self._guards(states, connected)
        elif memory.is_falling and self._may_try:
            rows = self._carried(states)
        self.rows = tuple(islice(rows, MAX_ROWS))
        return before != self.rows

    def _guards(self, states: list[KeyState], connected: Collection[CommunicatorClass]) -> Iterator[PlanRow]:
        """For every size class not seen yet, the best connected setting of its octave."""
        seen = {(state.family, state.key.size_class) for state in states}
        # The most frequent communicators were seen first, so their rows come first.
        for communicator in connected:
            for collective in TUNABLE:
                family = communicator, collective
                best = self._connected_best(family)
                yield from _rows(family, ((one, None if (family, one) in seen else best[one]) for one in best), SHORT)

    def _connected_best(self, family: Family) -> dict[int, Candidate]:
        """By size class, the cheapest setting that connects nothing; among nearly equal ones, the fewest channels."""
        costs = self._tables.costs
        options = [one for one in costs.candidates(*family) if self._memory.has_room_for(one, family[0])]
        options.sort(key=lambda one: one.n_channels)
        if not options:
            return {}
        log_us = np.nan_to_num(costs.log_cost(*family, options, 1.5 * 2.0 ** np.array(OCTAVES)), nan=np.inf)
        cheapest = np.argmax(log_us <= log_us.min(axis=1, keepdims=True) + MIN_GAIN, axis=1).tolist()
        n_classes = SIZE_CLASSES_PER_OCTAVE
        return {
            octave * n_classes + part: options[at]
            for octave, at in zip(OCTAVES, cheapest, strict=True)
            for part in range(n_classes)
        }

    def _carried(self, states: list[KeyState]) -> Iterator[PlanRow]:
        by_size = sorted(states, key=lambda state: state.key.size_class)
        for state in {state.family: state for state in by_size if state.key.collective in TUNABLE}.values():
            first = state.key.size_class + 1
            settings = (
                (one, state.usual if self._gain(state, one) > MIN_GAIN else BASELINE)
                for one in range(first, first + OCTAVES_AHEAD * SIZE_CLASSES_PER_OCTAVE)
            )
            yield from _rows(state.family, settings, FREE)

    def _gain(self, state: KeyState, size_class: int) -> float:
        """By how much (log) a key's setting should be faster than NCCL's own choice in a larger size class.

        This is the measured gain at the key, less the loss by NCCL's costs and by the distance. NaN if the gain is
        unknown, or if NCCL chooses another algorithm or protocol there: the gain was not measured against that.
        """
        costs, usual, evidence = self._tables.costs, state.usual, self._surrogate.evidence
        ends = size_class_floor(size_class), size_class_floor(size_class + 1) - 1
        sizes = int(state.message_bytes), *ends
        defaults = [costs.default(*state.family, size, described_only=True) for size in sizes]
        settings = [one for one in defaults if one is not None]
        if len(settings) < len(sizes) or len({cell_of(one) for one in settings}) > 1:
            return math.nan
        if not self._memory.allows(usual, state.family[0]):
            return math.nan
        log_us = costs.log_cost(*state.family, (*settings, usual), np.array(sizes, np.float64))
        here, *there = np.diagonal(log_us) - log_us[:, -1]
        octaves = math.log2(ends[1] / state.message_bytes)
        lost = max(0.0, here - min(there)) + LOST_PER_OCTAVE * octaves
        own_log_us, usual_log_us = (evidence.known_log_us(state.index, one) for one in (BASELINE, usual))
        return own_log_us - usual_log_us - float(lost)


def covering(rows: tuple[PlanRow, ...], key: DecisionKey) -> PlanRow | None:
    """The row that applies to a key before it has its own."""
    place = key.communicator, Collective(key.collective), Phase(key.phase), size_class_floor(key.size_class)
    return next((row for row in rows if row.holds_for(*place)), None)


def _rows(family: Family, settings: Iterable[tuple[int, Candidate | None]], reason: str) -> Iterator[PlanRow]:
    """Neighbouring size classes with one setting get one row; a size class without a setting gets none.

    Rows hold in any phase, since the phase of a size's first call is not known before.
    """
    for setting, same in groupby(settings, key=lambda one: one[1]):
        if setting is not None:
            classes = [one for one, _ in same]
            ends = size_class_floor(classes[0]), size_class_floor(classes[-1] + 1) - 1
            yield PlanRow(*family, None, *ends, setting, reason)
