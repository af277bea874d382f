"""Decision keys: the state of each, its number of calls, its options and their predicted durations.

NCCL's cost and the learned correction are the same for all phases of one message size. They are evaluated per
family (communicator class, collective) and message size. Only earlier jobs' measurements at the key itself
differ by phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ....agent.nccl import catalog
from ....agent.nccl.catalog import CHANNEL_LADDER
from ....agent.nccl.cost_model import channels_used
from ....store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Protocol,
    size_class,
)
from ...modeling.cost_prior import CostPrior
from ...modeling.equal_channels import asked_for
from ...modeling.features import NO_CELL, Floats, Ints, cell_of, key_codes, key_of, size_classes
from ...modeling.posterior import Column
from ..knowledge import MIDDLING_BYTES, Knowledge
from .observations import AT_ONCE, ENOUGH, Columns


class CandidateTable(NamedTuple):
    """The options of one key, the baseline first; `table` has a row for each, with the columns of `Column`."""

    options: tuple[Candidate, ...]
    place: Mapping[Candidate, int]
    """The index of each candidate in `options`."""
    table: Floats


Family = tuple[CommunicatorClass, Collective]
"""Keys of one family differ only by phase and message size."""

MOST_CHANNELS: Final = max(CHANNEL_LADDER)
INCUMBENT_EVERY: Final = 12
"""Beside a provisional setting, the incumbent gets one in this many windows without a trial."""
COMMON_DOUBT: Final = 1.5
"""How far off (log) all guesses may be together if nobody described the hardware: the first calls then show the
scale.
"""
VERIFYING_WINDOWS: Final = 8
"""A setting that earlier jobs proved alternates with the incumbent in this many windows at first."""
NO_PREDICTION: Final = (0.0, math.inf)
"""No earlier measurement predicts the gain of a provisional setting."""


class WindowOwner(Enum):
    """Which of a key's settings has a window."""

    trial = "trial"
    provisional = "provisional"
    incumbent = "incumbent"


class KeyState:
    """Everything the policy remembers about one decision key; mutable, one per key and regime."""

    def __init__(self, index: int, key: DecisionKey, message_bytes: float) -> None:
        self.index = index
        self.key = key
        self.family: Family = key.communicator, Collective(key.collective)
        self.message_bytes = message_bytes
        self.incumbent: Candidate = BASELINE
        self.incumbent_reason = "nothing measured beats NCCL's own choice yet"
        self.trial: Candidate | None = None
        self.trial_reason = ""
        self.provisional: Candidate | None = None
        """Probably faster than the incumbent, but not beyond doubt; it runs until that is decided."""
        self.provisional_reason = ""
        self.provisional_gain = NO_PREDICTION
        """By how much (log) the provisional setting was faster than the incumbent in earlier jobs, and the standard
        deviation.
        """
        self.provisional_is_proven = False
        """Earlier jobs proved the provisional setting: it runs at once, is not charged, and is verified on the side."""
        self.predicted_gain = (0.0, 1.0)
        """By how much (log) the trial should be faster than `usual`, and the standard deviation."""
        self.trial_until_units = 0.0
        """Units of evidence at which an open trial is a tie."""
        self.window_owner = WindowOwner.incumbent
        """The owner of the last window, even if it ran only in the first steps."""
        self.n_provisional_windows = 0
        """Windows without a trial since the provisional setting began."""
        self.trial_order: dict[Candidate, int] = {}
        """Number, from 1, of each candidate that was on trial; later ones get a smaller error level."""
        self.default_setting: Candidate | None = None
        """NCCL's own choice here."""
        self.max_channels = MOST_CHANNELS
        """More channels slow training down, as a variant of the plan showed."""
        self.banned: dict[Candidate, str] = {}
        self.retired: dict[Candidate, str] = {}
        """Candidates whose trial proved nothing: tried again if no other candidate is worth a trial."""
        self.field: CandidateTable | None = None
        """Its options with their starting guesses; None until needed."""
        self.last_posterior: tuple[Floats, Floats] | None = None
        """Mean and standard deviation (log) of every option at the last look at the key."""
        self.cooldown_until = 0

    @property
    def usual(self) -> Candidate:
        """The setting that runs here when nothing is on trial."""
        return self.incumbent if self.provisional is None else self.provisional

    def has(self, candidate: Candidate) -> bool:
        """Whether the candidate is on trial, provisional or the incumbent."""
        return candidate in (self.trial, self.provisional, self.incumbent)

    def begin_window(self, *, provisionals_rest: bool | None = None) -> None:
        """A trial gets the first window and every other one; a provisional setting gets nearly all others.

        A setting that earlier jobs proved alternates with the incumbent at first, as a trial does: so it is verified.
        While steps are compared, provisional settings run in no window, or in all if `provisionals_rest` is False:
        alternating settings would scatter the steps.
        """
        if self.trial is not None and self.window_owner is not WindowOwner.trial:
            self.window_owner = WindowOwner.trial
            return
        if self.provisional is not None and provisionals_rest is None:
            self.n_provisional_windows += 1
            is_verified = self.provisional_is_proven and self.n_provisional_windows <= VERIFYING_WINDOWS
            # The incumbents of different keys run in different windows.
            now, every = (0, 2) if is_verified else (self.index, INCUMBENT_EVERY)
            provisionals_rest = (self.n_provisional_windows + now) % every == 0
        runs_incumbent = self.provisional is None or provisionals_rest
        self.window_owner = WindowOwner.incumbent if runs_incumbent else WindowOwner.provisional

    def channels_of(self, candidate: Candidate) -> int:
        """The channels that a setting runs with here; 0 if unknown."""
        if candidate.n_channels or self.default_setting is None:
            return candidate.n_channels
        return self.default_setting.n_channels

    def reopen(self) -> None:
        """Forget verdicts; the settings in force stay until evidence speaks against them."""
        self.provisional_gain = NO_PREDICTION
        self.max_channels = MOST_CHANNELS
        self.banned.clear()
        self.retired.clear()
        self.trial_order = {} if self.provisional is None else {self.provisional: 1}
        self.last_posterior = None
        self.cooldown_until = 0


MAX_KEYS: Final = 4000
"""Most keys: a plan's table has a row for each, and some more."""
LEAST_IDLE_STEPS: Final = 20
"""A key is no longer expected after this many steps without a call, and ENOUGH of its usual gaps."""


class Traffic(NamedTuple):
    """How often each key is called, arrays of shape [n_keys]."""

    per_step: Floats = np.zeros(0)
    """Calls per step, on average over all steps."""
    at_once: Floats = np.zeros(0)
    """Calls per step, on average over the steps that call the key."""
    is_expected: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
    """Whether the key's last call is no longer ago than its usual gaps explain."""

    def calls_in(self, key: int, n_steps: float) -> float:
        """Most calls of one key in `n_steps` steps: even a rare key may be called in the next step."""
        return max(float(self.per_step[key]) * n_steps, float(self.at_once[key]))


class KeyTable(Columns):
    """Keys in the order they were first seen."""

    def __init__(self, tables: CandidateTables) -> None:
        self._tables = tables
        self.states = tables.states
        self._n_met = 0
        self._index: dict[int, int] = {}
        """The index of each key by its code."""
        self._first_step, self._last_step, self._n_calls, self._n_steps = np.zeros((4, 0), np.int64)
        """`_n_steps` counts the steps that called the key."""
        self._newest_step = 0
        self._reference_log, self._slope = np.zeros((2, 0))
        self._has_default = np.zeros(0, np.bool_)

    def indices(self, block: npt.NDArray[np.void]) -> Ints:
        """Key index of every measurement, shape [n]; -1 if no more keys can be added."""
        classes = size_classes(block["message_bytes"])
        codes = key_codes(block["n_ranks"], block["n_nodes"], block["collective"], block["phase"], classes)
        distinct, first, of = np.unique(codes, return_index=True, return_inverse=True)
        found = np.array([self._index.get(code, -1) for code in distinct.tolist()], np.int64)
        new = np.flatnonzero(found < 0)[: MAX_KEYS - len(self.states)]
        if len(new):
            found[new] = len(self.states) + np.arange(len(new))
            self._add(distinct[new].tolist(), block[first[new]])
        return found[of]

    def meet_proven(self, block: npt.NDArray[np.void]) -> None:
        """Add keys for which earlier jobs proved a setting at their first call, measured or not."""
        classes, proves = size_classes(block["message_bytes"]), self._tables.knowledge.decided
        codes = key_codes(block["n_ranks"], block["n_nodes"], block["collective"], block["phase"], classes)
        distinct, first = np.unique(codes, return_index=True)
        new = [code not in self._index and proves(key_of(code)) is not None for code in distinct.tolist()]
        self.indices(block[first[new]])

    def logs(self, block: npt.NDArray[np.void], keys: Ints) -> Floats:
        """Log durations, scaled to each key's own message size: a size class is a quarter octave wide."""
        log_bytes = np.log(block["message_bytes"].astype(np.float64))
        logs: Floats = np.log(block["duration_us"]) - self._slope[keys] * (log_bytes - self._reference_log[keys])
        return logs

    def count(self, keys: Ints, steps: Ints) -> None:
        """Calls of these keys were measured, each in its step."""
        for step in sorted(set(steps.tolist())):
            n_calls = np.bincount(keys[steps == step], minlength=len(self._n_calls))
            is_called = n_calls > 0
            self._n_calls += n_calls
            self._n_steps += is_called & (self._last_step != step)
            self._last_step[is_called] = step
            self._newest_step = max(self._newest_step, step)

    def traffic(self) -> Traffic:
        """How often each key is called, up to the newest step that was measured."""
        here = slice(len(self.states))
        first, n_calls, n_called = self._first_step[here], self._n_calls[here], np.maximum(self._n_steps[here], 1)
        n_steps = np.maximum(1, self._newest_step - first + 1)
        usual_gap = (self._last_step[here] - first) / np.maximum(n_called - 1, 1)
        idle_steps = self._newest_step - self._last_step[here]
        return Traffic(
            per_step=n_calls / n_steps,
            at_once=np.maximum(n_calls / n_called, 1.0),
            is_expected=idle_steps <= np.maximum(ENOUGH * usual_gap, LEAST_IDLE_STEPS),
        )

    def learn_defaults(self, block: npt.NDArray[np.void], keys: Ints) -> None:
        """Note NCCL's own choice at each of these keys, shape [n], and how many channels it has."""
        unknown = np.flatnonzero(~self._has_default[keys])
        if not len(unknown):
            return
        unknown = unknown[(block["algorithm"][unknown] != NO_CELL) & (block["is_default"][unknown] > 0)]
        _, first = np.unique(keys[unknown], return_index=True)
        for place in unknown[first].tolist():
            row, state = block[place], self.states[keys[place]]
            try:
                cell = Algorithm(int(row["algorithm"])), Protocol(int(row["protocol"]))
            except ValueError:
                continue  # an algorithm or protocol of a newer NCCL
            state.default_setting = Candidate(*cell, min(int(row["n_channels"]), MOST_CHANNELS))
            state.field = None
            self._has_default[keys[place]] = True
            self._tables.costs.learn_channels(state.key.communicator, state.default_setting.n_channels)

    def _add(self, codes: list[int], rows: npt.NDArray[np.void]) -> None:
        start, nbytes = len(self.states), rows["message_bytes"].astype(np.float64)
        new = [KeyState(start + at, key_of(code), nbytes.item(at)) for at, code in enumerate(codes)]
        self._index |= {code: start + at for at, code in enumerate(codes)}
        self.make_room(start + len(new))
        here = slice(start, start + len(new))
        self._first_step[here], self._last_step[here], self._reference_log[here] = rows["step"], -1, np.log(nbytes)
        for family in {state.family for state in new}:
            at = np.array([place for place, state in enumerate(new) if state.family == family])
            sizes = np.concatenate([nbytes[at], 1.1 * nbytes[at]])
            own, larger = np.split(self._tables.costs.log_cost(*family, (BASELINE,), sizes)[:, 0], 2)
            slope = (larger - own) / math.log(1.1)
            self._slope[start + at] = np.where(np.isfinite(slope), np.clip(slope, 0.0, 1.0), 0.5)
        for state in new:
            self._tables.register(state)

    def new(self) -> list[KeyState]:
        """Keys that were seen for the first time since the last call."""
        n_met, self._n_met = self._n_met, len(self.states)
        return self.states[n_met:]


class FamilyFacts(NamedTuple):
    """Facts that all keys of one family share."""

    offered: tuple[Candidate, ...]
    cells: set[tuple[int, int]]
    is_guesswork: bool
    """Nobody described the hardware, NCCL reported no costs and no earlier run left a model."""
    doubt_in_common: float
    """How far off (log) guesses or measurements of other communicators may be for all options together."""


class CandidateTables(Columns):
    """Makes the tables of keys' options and keeps them until costs or knowledge change."""

    def __init__(self, costs: CostPrior) -> None:
        self.costs = costs
        """NCCL's costs, behind all predictions."""
        self.knowledge = Knowledge()
        """Results of earlier jobs."""
        self._made_for: object = None
        self.states: list[KeyState] = []
        """Of all keys, by key index."""
        self.places = np.zeros((0, 3), np.int64)
        """The communicator's number, the collective and the size class of each key."""
        self._communicators: dict[CommunicatorClass, int] = {}
        self._families: dict[Family, FamilyFacts] = {}
        self._guesses: dict[Family, dict[int, tuple[Floats, Floats, Floats]]] = {}
        self._alike: dict[tuple[object, ...], CandidateTable] = {}
        """Tables of options that keys share if they differ only by phase."""

    def register(self, state: KeyState) -> None:
        """A key was seen for the first time."""
        self.states.append(state)
        self.make_room(len(self.states))
        number = self._communicators.setdefault(state.key.communicator, len(self._communicators))
        self.places[state.index] = number, state.key.collective, state.key.size_class

    def follow(self) -> object:
        """Drop all tables if costs or knowledge have changed; the returned object changes with them."""
        now = self.costs, self.costs.revision, self.knowledge
        if now != self._made_for:
            self._made_for = now
            for kept in (self._families, self._guesses, self._alike):
                kept.clear()
            for state in self.states:
                state.field = None
                state.cooldown_until = 0
        return now

    def of(self, state: KeyState) -> CandidateTable:
        """The options of one key."""
        self.follow()
        if state.field is None:
            state.field = self._make(state)
        return state.field

    def offers(self, family: Family, candidate: Candidate) -> bool:
        """Whether NCCL can run that algorithm and protocol, by its costs; it clamps channel counts itself."""
        if candidate.chunk_bytes and candidate.algorithm not in catalog.TAKES_CHUNK_SIZE:
            return False
        return candidate.is_baseline or cell_of(candidate) in self.family(family).cells

    def named(self, state: KeyState, ran: Candidate) -> Candidate:
        """The option of this key that stands for a setting that ran in earlier jobs."""
        return asked_for(ran, {str(one) for one in self.costs.candidates(*state.family)}, state.key)

    def family(self, family: Family) -> FamilyFacts:
        """The facts that the family's keys share."""
        self.follow()
        if family not in self._families:
            costs, knowledge, offered = self.costs, self.knowledge, self.costs.candidates(*family)
            is_guesswork = knowledge.correction is None and costs.default(*family, MIDDLING_BYTES) is None
            doubt = COMMON_DOUBT if is_guesswork else knowledge.doubt_in_common(family, costs)
            self._families[family] = FamilyFacts(offered, {cell_of(one) for one in offered}, is_guesswork, doubt)
        return self._families[family]

    def _make(self, state: KeyState) -> CandidateTable:
        name = state.family, state.message_bytes, state.default_setting, state.incumbent
        alike = self._alike.get(name) or self._alike.setdefault(name, self._predicted(state))
        table = alike.table.copy()
        table[:, Column.key] = [state.index + one.chunk_bytes / 2**26 for one in alike.options]  # errors of their own
        self.knowledge.apply_measurements(state.key, alike.options, table[:, Column.guess], table[:, Column.std])
        return CandidateTable(alike.options, alike.place, table)

    def _predicted(self, state: KeyState) -> CandidateTable:
        family, (offered, _, is_guesswork, _) = state.family, self.family(state.family)
        options = self._options_of(state, offered)
        column = {candidate: at for at, candidate in enumerate(offered)}
        at = np.array([column.get(msgspec.structs.replace(one, chunk_bytes=0), -1) for one in options])
        is_chunked = np.array([one.chunk_bytes > 0 for one in options])
        guesses, ran = self._guess(state), state.default_setting
        mean, std, share = (one[at] for one in guesses)
        log2_bytes, n_available = math.log2(state.message_bytes), self.costs.max_channels(family[0])
        if is_guesswork:
            cell = None if ran is None else column.get(Candidate(ran.algorithm, ran.protocol, n_available))
            mean[0] = self._guess_of_default(state) if cell is None else guesses[0][cell]
        mean[at < 0] = np.nan  # an earlier incumbent that is no longer offered
        mean[is_chunked], std[is_chunked] = np.nan, COMMON_DOUBT  # only measurements tell
        shown = [ran or option if option.algorithm is None else option for option in options]
        table = np.empty((len(options), len(Column)))
        table[:, : Column.guess] = [(log2_bytes, one.n_channels or n_available, *cell_of(one)) for one in shown]
        table[:, Column.log2_channels] = np.log2(table[:, Column.log2_channels])
        table[:, Column.guess], table[:, Column.std], table[:, Column.transfer_share] = mean, std, share
        table[:, Column.octaves_fewer] = np.maximum(0.0, math.log2(n_available) - table[:, Column.log2_channels])
        table[:, Column.collective], table[:, Column.key] = family[1], state.index
        return CandidateTable(options, {option: at for at, option in enumerate(options)}, table)

    def _guess_of_default(self, state: KeyState) -> float:
        """Log microseconds of NCCL's own choice if its costs are not known.

        The guess is that of the algorithm and protocol that ran, or the mean over those possible. Their minimum would
        be too low for most choices: NCCL's own choice would seem slow, and so would all untried candidates.
        """
        (communicator, collective), default = state.family, state.default_setting
        if default is None:
            n_ranks, n_nodes = communicator.n_ranks, communicator.n_nodes
            cells = catalog.legal_cells(collective, n_nodes=n_nodes, n_ranks=n_ranks, nvls=False)
            settings = [Candidate(*cell) for cell in cells] or [BASELINE]
        else:
            settings = [Candidate(default.algorithm, default.protocol)]
        return float(self.costs.log_cost(communicator, collective, settings, state.message_bytes).mean())

    def _guess(self, state: KeyState) -> tuple[Floats, Floats, Floats]:
        family, nbytes = state.family, int(state.message_bytes)
        known = self._guesses.setdefault(family, {})
        if nbytes not in known:
            is_alike = (self.places[: len(self.states), :2] == self.places[state.index, :2]).all(axis=1)
            met = (int(self.states[key].message_bytes) for key in np.flatnonzero(is_alike).tolist())
            batch = [*dict.fromkeys([nbytes, *(one for one in met if one not in known)])][:AT_ONCE]
            classes = np.array([size_class(one) for one in batch], dtype=np.int64)
            sizes = np.array(batch, dtype=np.float64)
            offered = self.family(family).offered
            means, stds = self.knowledge.guess(*family, offered, sizes, classes, self.costs, carries_over=False)
            shares = self.costs.transfer_share(*family, offered, sizes)
            shares[np.isnan(shares)] = 1.0
            known.update(zip(batch, zip(means, stds, shares, strict=True), strict=True))
        return known[nbytes]

    def _options_of(self, state: KeyState, offered: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """The baseline, settings that differ after NCCL has clamped channels, and those measured by chunk size."""
        nbytes, default = int(state.message_bytes), state.default_setting
        seen = {(*cell_of(default), default.n_channels)} if default is not None and default.n_channels else set()
        found = [BASELINE]
        for candidate in offered:
            if candidate.algorithm is None or candidate.protocol is None:
                continue
            used = channels_used(state.family[1], candidate.protocol, nbytes, candidate.n_channels)
            effect = (*cell_of(candidate), used)
            if effect not in seen:
                seen.add(effect)
                found.append(candidate)
        found += [one for one in self.knowledge.with_chunk_size(state.key) if self.offers(state.family, one)]
        return tuple(found if state.incumbent in found else [*found, state.incumbent])
