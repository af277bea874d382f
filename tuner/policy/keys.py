"""The decision keys of one job, found by integer code, with what is known of each as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Protocol
from tuner.features import NO_CELL, CostPrior, Floats, Ints, key_codes, key_of, size_classes
from tuner.policy.trial import KeyState

MAX_KEYS: Final = 4000
"""Rows a plan table holds, with some to spare."""
LOWEST_RATE: Final = 0.01
_INNER_BITS: Final = 15
_CODES_PER_PLACE: Final = 1 << _INNER_BITS
"""Collective, phase and size class of a key's code; the rest is the communicator class."""


class KeyTable:
    """Keys in the order they were first seen; `on_new` is told of each."""

    def __init__(self, on_new: Callable[[KeyState], None]) -> None:
        self.states: list[KeyState] = []
        self._on_new = on_new
        self._places: dict[int, Ints] = {}
        """Key index by the low bits of the code, per communicator class; -1 where there is none."""
        self._first_step = np.zeros(0, np.int64)
        self._n_calls = np.zeros(0, np.int64)
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

    def count(self, keys: Ints) -> None:
        """Calls of these keys were measured."""
        self._n_calls += np.bincount(keys, minlength=len(self._n_calls))

    def rates(self, step: int) -> Floats:
        """How often each key is called per step, up to `step`; shape [n_keys]."""
        n_keys = len(self.states)
        n_steps = np.maximum(1, step - self._first_step[:n_keys] + 1)
        return np.maximum(self._n_calls[:n_keys] / n_steps, LOWEST_RATE)

    def learn_defaults(self, block: npt.NDArray[np.void], keys: Ints, costs: CostPrior) -> None:
        """Note what NCCL does at each key when left alone, and how many channels there are."""
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
        for name in ("_first_step", "_n_calls", "_reference_log", "_slope", "_has_default"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))


_ALGORITHMS: Final = frozenset(int(member) for member in Algorithm)
_PROTOCOLS: Final = frozenset(int(member) for member in Protocol)
