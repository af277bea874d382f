"""The decision keys of one job, found by integer code, with what is known of each as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Protocol
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import NO_CELL, CostPrior, Floats, Ints, key_codes, key_of, size_classes

MAX_KEYS: Final = 4000
"""Rows a plan table holds, with some to spare."""
LOWEST_RATE: Final = 0.01
MISSED_GAPS: Final = 3.0
"""A key that was not called for this many times as long as usual is not expected any more."""
LEAST_IDLE_STEPS: Final = 20
_INNER_BITS: Final = 15
_CODES_PER_PLACE: Final = 1 << _INNER_BITS
"""Collective, phase and size class of a key's code; the rest is the communicator class."""


class Traffic(NamedTuple):
    """How often each key is called, arrays of shape [n_keys]."""

    per_step: Floats
    """Calls per step, on average over all steps."""
    at_once: Floats
    """Calls in a step that calls the key at all."""
    is_expected: npt.NDArray[np.bool_]
    """It was called lately, by its own measure."""

    @staticmethod
    def empty() -> Traffic:
        """No keys."""
        return Traffic(np.zeros(0), np.zeros(0), np.zeros(0, np.bool_))

    def calls_in(self, key: int, n_steps: float) -> float:
        """Calls of one key that `n_steps` may make; a key that is called seldom may be called at once."""
        return max(float(self.per_step[key]) * n_steps, float(self.at_once[key]))


class KeyTable:
    """Keys in the order they were first seen; `on_new` is told of each."""

    def __init__(self, on_new: Callable[[KeyState], None]) -> None:
        self.states: list[KeyState] = []
        self._on_new = on_new
        self._places: dict[int, Ints] = {}
        """Key index by the low bits of the code, per communicator class; -1 where there is none."""
        self._first_step = np.zeros(0, np.int64)
        self._last_step = np.zeros(0, np.int64)
        self._n_calls = np.zeros(0, np.int64)
        self._n_steps = np.zeros(0, np.int64)
        """Steps that called the key."""
        self._newest_step = 0
        self._reference_log = np.zeros(0)
        self._slope = np.zeros(0)
        self._has_default = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self.states)

    def indices(self, block: npt.NDArray[np.void], costs: CostPrior) -> Ints:
        """Key index of every measurement, shape [n]; -1 where no key can be added any more."""
        classes = size_classes(block["message_bytes"])
        codes = key_codes(block["n_ranks"], block["n_nodes"], block["collective"], block["phase"], classes)
        found = self._find(codes)
        if len(self.states) < MAX_KEYS and (unknown := np.flatnonzero(found < 0)).size:
            new, first = np.unique(codes[unknown], return_index=True)
            room = MAX_KEYS - len(self.states)
            self._add(new[:room], block[unknown[first[:room]]], costs)
            found = self._find(codes)
        return found

    def logs(self, block: npt.NDArray[np.void], keys: Ints) -> Floats:
        """Log durations, moved to each key's own message size: a class is a quarter octave wide."""
        log_bytes = np.log(block["message_bytes"].astype(np.float64))
        logs: Floats = np.log(block["duration_us"]) - self._slope[keys] * (log_bytes - self._reference_log[keys])
        return logs

    def count(self, keys: Ints, steps: Ints) -> None:
        """Calls of these keys were measured, each in its step."""
        for step in np.unique(steps).tolist():
            n_calls = np.bincount(keys[steps == step], minlength=len(self._n_calls))
            is_called = n_calls > 0
            self._n_calls += n_calls
            self._n_steps += is_called & (self._last_step != step)
            self._last_step[is_called] = step
            self._newest_step = max(self._newest_step, step)

    def traffic(self, step: int) -> Traffic:
        """How often each key is called, up to `step`."""
        here = slice(len(self.states))
        first, n_calls, n_called = self._first_step[here], self._n_calls[here], np.maximum(self._n_steps[here], 1)
        n_steps = np.maximum(1, step - first + 1)
        usual_gap = (self._last_step[here] - first) / np.maximum(n_called - 1, 1)
        idle_steps = self._newest_step - self._last_step[here]
        return Traffic(
            per_step=np.maximum(n_calls / n_steps, LOWEST_RATE),
            at_once=np.maximum(n_calls / n_called, 1.0),
            is_expected=idle_steps <= np.maximum(MISSED_GAPS * usual_gap, LEAST_IDLE_STEPS),
        )

    def learn_defaults(self, block: npt.NDArray[np.void], keys: Ints, costs: CostPrior) -> None:
        """Note what NCCL chooses at each key by itself, and how many channels there are.

        Args:
            block: measurements (MEASUREMENT_FIELDS), shape [n].
            keys: key index of each, shape [n].
            costs: told of the channels.
        """
        unknown = np.flatnonzero(~self._has_default[keys])
        if not len(unknown):
            return
        unknown = unknown[(block["algorithm"][unknown] != NO_CELL) & (block["is_default"][unknown] > 0)]
        _, first = np.unique(keys[unknown], return_index=True)
        for place in unknown[first].tolist():
            row, state = block[place], self.states[keys[place]]
            if row["algorithm"] not in _ALGORITHMS or row["protocol"] not in _PROTOCOLS:
                continue
            n_channels = min(int(row["n_channels"]), 64)
            state.default_setting = Candidate(
                Algorithm(int(row["algorithm"])), Protocol(int(row["protocol"])), n_channels
            )
            state.field = None
            self._has_default[keys[place]] = True
            costs.learn_channels(state.key.communicator, n_channels)

    def _find(self, codes: Ints) -> Ints:
        places, inner = codes >> _INNER_BITS, codes & (_CODES_PER_PLACE - 1)
        first = int(places[0])
        if (places == first).all():
            table = self._places.get(first)
            return np.full(len(codes), -1, np.int64) if table is None else table[inner]
        found = np.full(len(codes), -1, np.int64)
        for place in np.unique(places).tolist():
            table = self._places.get(place)
            if table is not None:
                here = places == place
                found[here] = table[inner[here]]
        return found

    def _add(self, codes: Ints, rows: npt.NDArray[np.void], costs: CostPrior) -> None:
        start = len(self.states)
        if start + len(codes) > len(self._n_calls):
            self._grow(max(64, len(codes), start))
        self._first_step[start : start + len(codes)] = rows["step"]
        self._last_step[start : start + len(codes)] = -1
        by_family: dict[tuple[CommunicatorClass, Collective], list[KeyState]] = {}
        for code, nbytes in zip(codes.tolist(), rows["message_bytes"].astype(np.float64).tolist(), strict=True):
            state = KeyState(len(self.states), key_of(code), nbytes)
            place, inner = divmod(code, _CODES_PER_PLACE)
            if place not in self._places:
                self._places[place] = np.full(_CODES_PER_PLACE, -1, np.int64)
            self._places[place][inner] = state.index
            self.states.append(state)
            by_family.setdefault(state.family, []).append(state)
        for family, states in by_family.items():
            nbytes = np.array([state.message_bytes for state in states])
            here = np.array([state.index for state in states])
            both = costs.log_cost(*family, (BASELINE,), np.concatenate([nbytes, 1.1 * nbytes]))[:, 0]
            slope = (both[len(states) :] - both[: len(states)]) / math.log(1.1)
            self._slope[here] = np.where(np.isfinite(slope), np.clip(slope, 0.0, 1.0), 0.5)
            self._reference_log[here] = np.log(nbytes)
        for state in self.states[start:]:
            self._on_new(state)

    def _grow(self, more: int) -> None:
        for name in ("_first_step", "_last_step", "_n_calls", "_n_steps", "_reference_log", "_slope", "_has_default"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))


_ALGORITHMS: Final = frozenset(int(member) for member in Algorithm)
_PROTOCOLS: Final = frozenset(int(member) for member in Protocol)
