"""The decision keys of one job, found by integer code, with what is known of each as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from store.records import BASELINE, Algorithm, Candidate, Protocol
from tuner.features import NO_CELL, CostPrior, Floats, Ints, key_codes, key_of, size_classes
from tuner.policy.trial import KeyState

MAX_KEYS: Final = 4000
"""Rows a plan table holds, with some to spare."""


class KeyTable:
    """Keys in the order they were first seen; `on_new` is told of each."""

    def __init__(self, on_new: Callable[[KeyState], None]) -> None:
        self.states: list[KeyState] = []
        self._on_new = on_new
        self._index: dict[int, int] = {}
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
        unique, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        found = np.array([self._index.get(code, -1) for code in unique.tolist()], dtype=np.int64)
        for place in np.flatnonzero(found < 0).tolist():
            if len(self.states) < MAX_KEYS:
                found[place] = self._add(int(unique[place]), block[first[place]], costs)
        indices: Ints = found[inverse]
        return indices

    def logs(self, block: npt.NDArray[np.void], keys: Ints) -> Floats:
        """Log durations, moved to each key's own message size: a class is a quarter octave wide."""
        log_bytes = np.log(block["message_bytes"].astype(np.float64))
        logs: Floats = np.log(block["duration_us"]) - self._slope[keys] * (log_bytes - self._reference_log[keys])
        return logs

    def count(self, keys: Ints) -> None:
        """Calls of these keys were measured."""
        np.add.at(self._n_calls, keys, 1)

    def update_rates(self, step: int) -> None:
        """Work out how often each key is called per step, up to `step`."""
        n_steps = np.maximum(1, step - self._first_step[: len(self.states)] + 1)
        rates = self._n_calls[: len(self.states)] / n_steps
        for state, rate in zip(self.states, rates.tolist(), strict=True):
            state.calls_per_step = max(rate, 0.01)

    def learn_defaults(self, block: npt.NDArray[np.void], keys: Ints, costs: CostPrior) -> None:
        """Note what NCCL does at each key when left alone, and how many channels there are."""
        ran = (block["algorithm"] != NO_CELL) & (block["is_default"] > 0)
        unknown = np.flatnonzero(ran & ~self._has_default[keys])
        _, first = np.unique(keys[unknown], return_index=True)
        for place in unknown[first].tolist():
            row, state = block[place], self.states[keys[place]]
            if row["algorithm"] not in _ALGORITHMS or row["protocol"] not in _PROTOCOLS:
                continue
            n_channels = min(int(row["n_channels"]), 64)
            state.default_setting = Candidate(
                Algorithm(int(row["algorithm"])), Protocol(int(row["protocol"])), n_channels
            )
            state.prior = None
            self._has_default[keys[place]] = True
            costs.learn_channels(state.key.communicator, n_channels)

    def _add(self, code: int, row: np.void, costs: CostPrior) -> int:
        index = len(self.states)
        state = KeyState(index, key_of(code), float(row["message_bytes"]))
        key = state.key
        self._index[code] = index
        self.states.append(state)
        if index >= len(self._n_calls):
            more = max(64, index)
            self._first_step = np.concatenate([self._first_step, np.zeros(more, np.int64)])
            self._n_calls = np.concatenate([self._n_calls, np.zeros(more, np.int64)])
            self._reference_log = np.concatenate([self._reference_log, np.zeros(more)])
            self._slope = np.concatenate([self._slope, np.zeros(more)])
            self._has_default = np.concatenate([self._has_default, np.zeros(more, np.bool_)])
        sizes = np.array([1.0, 1.1]) * state.message_bytes
        predicted = costs.log_cost(key.communicator, key.collective, (BASELINE,), sizes)[:, 0]
        slope = float(np.diff(predicted)[0]) / math.log(1.1)
        self._slope[index] = min(max(slope, 0.0), 1.0) if math.isfinite(slope) else 0.5
        self._reference_log[index] = math.log(state.message_bytes)
        self._first_step[index] = int(row["step"])
        self._on_new(state)
        return index


_ALGORITHMS: Final = frozenset(int(member) for member in Algorithm)
_PROTOCOLS: Final = frozenset(int(member) for member in Protocol)
