"""What could be asked at each key, and the starting guess of what it costs, worked out for many keys at once.

NCCL's cost and the learned correction are the same for all phases of one message size: they are evaluated
per family (communicator class, collective) and message size. Only what earlier runs measured at the very key
differs by phase.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from zerotune.agent.nccl import catalog
from zerotune.agent.nccl.cost_model import channels_used
from zerotune.store.records import BASELINE, Candidate, size_class
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.evidence.options_field import N_COLUMNS, Field
from zerotune.tuner.learning.policy.trials.trial import Family, KeyState
from zerotune.tuner.modeling.equal_channels import asked_for
from zerotune.tuner.modeling.features import CostPrior, Floats, cell_of

MAX_BATCH: Final = 64
"""Message sizes whose guesses are worked out in one go: bounds the time of one call."""


class FieldBook:
    """Makes fields, and keeps them until costs or knowledge have changed: `follow` sees to that by itself."""

    def __init__(self, costs: CostPrior) -> None:
        self._costs = costs
        self._knowledge = Knowledge.empty()
        self._cells: dict[Family, set[tuple[int, int]]] = {}
        self._n_exchanged = 0
        self._made_for = (0, costs.revision)
        self._states: list[KeyState] = []
        self._sizes: dict[Family, dict[int, None]] = {}
        """Message sizes met, in the order they were met."""
        self._guesses: dict[Family, dict[int, tuple[Floats, Floats, Floats]]] = {}
        self._options: dict[tuple[object, ...], tuple[Candidate, ...]] = {}
        self._doubts: dict[Family, float] = {}

    @property
    def costs(self) -> CostPrior:
        """What is predicted from; assign to exchange it."""
        return self._costs

    @costs.setter
    def costs(self, costs: CostPrior) -> None:
        self._costs = costs
        self._n_exchanged += 1

    @property
    def knowledge(self) -> Knowledge:
        """What earlier runs left; assign to exchange it."""
        return self._knowledge

    @knowledge.setter
    def knowledge(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._n_exchanged += 1

    def register(self, state: KeyState) -> None:
        """A key was seen for the first time."""
        self._sizes.setdefault(state.family, {})[int(state.message_bytes)] = None
        self._states.append(state)

    def follow(self) -> tuple[int, int]:
        """If costs or knowledge have changed, everything is worked out anew when it is asked for next.

        Returns:
            The same for as long as they are the same.
        """
        now = self._n_exchanged, self._costs.revision
        if now != self._made_for:
            self._made_for = now
            self._guesses.clear()
            self._options.clear()
            self._doubts.clear()
            self._cells.clear()
            for state in self._states:
                state.field = None
                state.quiet_until = 0
        return now

    def of(self, state: KeyState) -> Field:
        """The field of one key."""
        self.follow()
        if state.field is None:
            state.field = self._make(state)
        return state.field

    def offers(self, family: Family, candidate: Candidate) -> bool:
        """Whether NCCL can run that algorithm and protocol, as far as costs say; it clamps channel counts itself."""
        self.follow()
        if family not in self._cells:
            self._cells[family] = {cell_of(one) for one in self.costs.candidates(*family)}
        return candidate.is_baseline or cell_of(candidate) in self._cells[family]

    def named(self, state: KeyState, ran: Candidate) -> Candidate:
        """What ran in earlier jobs by the name under which it is offered at this key."""
        self.follow()
        return asked_for(ran, {str(one) for one in self.costs.candidates(*state.family)}, state.key)

    def is_guesswork(self, family: Family) -> bool:
        """Whether nobody described the hardware, NCCL reported no costs and no earlier run left a model."""
        return self.knowledge.correction is None and self.costs.default(*family, 1 << 20) is None

    def doubt_in_common(self, family: Family) -> float:
        """How far off (log) what earlier runs leave for other communicators may be for all options together."""
        self.follow()
        if family not in self._doubts:
            offered = self.costs.candidates(*family)
            self._doubts[family] = self.knowledge.doubt_in_common(*family, offered, self.costs)
        return self._doubts[family]

    def _make(self, state: KeyState) -> Field:
        family = state.family
        offered = self.costs.candidates(*family)
        mean, std, share = self._guess(family, int(state.message_bytes))
        options = self._options_of(state, offered)
        column = {candidate: at for at, candidate in enumerate(offered)}
        at = [column.get(option, -1) for option in options]
        mean, std = mean[at], std[at]
        if self.is_guesswork(family):
            mean[0] = self._guess_of_default(state)
        if -1 in at:  # an incumbent from another time, not offered any more
            mean[[index for index, place in enumerate(at) if place < 0]] = np.nan
        self.knowledge.overrule(state.key, options, mean, std)
        log2_bytes, n_available = math.log2(state.message_bytes), self.costs.max_channels(family[0])
        shown = [
            state.default_setting if option.algorithm is None and state.default_setting is not None else option
            for option in options
        ]
        table = np.empty((len(options), N_COLUMNS))
        table[:, 0] = log2_bytes
        table[:, 1:4] = [(math.log2(one.n_channels or n_available), *cell_of(one)) for one in shown]
        table[:, 4], table[:, 5], table[:, 6] = mean, std, share[at]
        np.maximum(0.0, math.log2(n_available) - table[:, 1], out=table[:, 7])
        return Field(options, table)

    def _guess_of_default(self, state: KeyState) -> float:
        """Log microseconds of NCCL's own choice where its costs are not known.

        Of the cell that ran, or the mean over those that may have. With the least of them, NCCL's choice would seem
        slower than guessed wherever it is another one, and all that was never tried would pass for as much slower.
        """
        (communicator, collective), default = state.family, state.default_setting
        n_ranks, n_nodes = communicator.n_ranks, communicator.n_nodes
        cells = catalog.legal_cells(collective, n_nodes=n_nodes, n_ranks=n_ranks, nvls=False)
        settings = [Candidate(*cell) for cell in cells] or [BASELINE]
        if default is not None:
            settings = [Candidate(default.algorithm, default.protocol)]
        return float(self.costs.log_cost(communicator, collective, settings, state.message_bytes).mean())

    def _guess(self, family: Family, nbytes: int) -> tuple[Floats, Floats, Floats]:
        known = self._guesses.setdefault(family, {})
        if nbytes not in known:
            waiting = [one for one in self._sizes.get(family, {}) if one not in known and one != nbytes]
            batch = [nbytes, *waiting[: MAX_BATCH - 1]]
            classes = np.array([size_class(one) for one in batch], dtype=np.int64)
            sizes = np.array(batch, dtype=np.float64)
            offered = self.costs.candidates(*family)
            means, stds = self.knowledge.guess(*family, offered, sizes, classes, self.costs, carries_over=False)
            shares = self.costs.transfer_share(*family, offered, sizes)
            shares[np.isnan(shares)] = 1.0
            known.update(zip(batch, zip(means, stds, shares, strict=True), strict=True))
        return known[nbytes]

    def _options_of(self, state: KeyState, offered: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Baseline and the candidates that differ from it and from one another once NCCL has clamped them."""
        nbytes, default = int(state.message_bytes), state.default_setting
        name = (state.family, nbytes, default)
        kept = self._options.get(name)
        if kept is None:
            seen: set[tuple[int, int, int]] = set()
            if default is not None and default.n_channels:
                seen.add((*cell_of(default), default.n_channels))
            found = [BASELINE]
            for candidate in offered:
                if candidate.algorithm is None or candidate.protocol is None:
                    continue
                used = channels_used(state.family[1], candidate.protocol, nbytes, candidate.n_channels)
                effect = (*cell_of(candidate), used)
                if effect not in seen:
                    seen.add(effect)
                    found.append(candidate)
            kept = self._options[name] = tuple(found)
        return kept if state.incumbent in kept else (*kept, state.incumbent)
