"""Follows one job's collectives and recognises the kind of training."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Final

import numpy as np
import numpy.typing as npt

from ...store.records import Collective, MissingEvidence, Stage
from ...store.wire import FLAG_TIMED
from .ambiguity import NO_GROUPS, Groups, unambiguous
from .encoding.encoders import LstmEncoder, decide
from .encoding.weights import default_encoder
from .labels import UNKNOWN, Shown
from .missing import missing_evidence
from .steps.anatomy import IS_SEEN, TINY, TINY_BYTES, Floats, Ints, Step, come_back_soon, encode
from .steps.cutting import MAX_CALLS, StepCutter
from .steps.interruptions import Interruptions

_log = logging.getLogger("zerotune.stage")

MAX_FLAGS: Final = 7
"""Most different sizes of consecutive small all-reduces: more show a benchmark over sizes, not training."""
UNCUT_CALLS: Final = 256
"""Least calls of a sequence without a period before it is judged as a whole."""
BLOCK_CALLS: Final = 4
_BOTH_WAYS: Final = {int(Collective.all_gather), int(Collective.reduce_scatter)}
ALIKE_SHARE: Final = 0.9
"""Least share of all calls that a short step with calls of one size must explain."""
MAX_UNTIMED: Final = 4096
"""After this many consecutive decisions without a time, the wait for times ends."""
STEPS_TO_EXPECT: Final = 3
"""A round that has repeated for this many of the job's own steps is a step, not a micro-step or a block."""
NOTHING: Final = np.zeros(0, np.int64)


class StageFingerprint:
    """One job's stage, from the sequence of (collective, message_bytes, start) alone.

    Steps are found by their repetition, so it does not matter when the daemon began to listen. A step that equals
    the last one costs one comparison; only a new step is scored.
    """

    def __init__(self, encoder: LstmEncoder | None = None) -> None:
        self.shown = UNKNOWN
        self._encoder = encoder if encoder is not None else default_encoder()
        self._interruptions = Interruptions()
        self._cutter = StepCutter()
        self._judged = UNKNOWN
        self._n_alike = self._alike_since = 0
        """Calls that repeat the step up to now, and the job's step at which they began."""
        self._last_start_us = 0.0
        self._judged_uncut_at = UNCUT_CALLS
        self._groups = _Communicators()
        self._n_untimed: int | None = None
        """Decisions since the last timed record; None: there are no times, so decisions are the sequence."""
        self.n_calls = 0
        """Calls taken in so far."""

    @property
    def stage(self) -> Stage:
        """The last stage that was shown."""
        return self.shown.stage

    @property
    def missing_evidence(self) -> MissingEvidence:
        """The evidence that is missing to tell the stage."""
        if self.stage is not Stage.unknown:
            return MissingEvidence.nothing
        codes = self._cutter.window[0] if self._cutter.period else self._cutter.codes[-UNCUT_CALLS:]
        calls = zip((codes & 15).tolist(), (codes >> 4).tolist(), strict=True)
        return missing_evidence(Counter(calls), repeats=bool(self._cutter.period))

    @property
    def gathers_after_step(self) -> bool:
        """Whether all-gathers outside backward are updated parameters (ZeRO-1, 2), not forward gathers."""
        return self.shown.stage in (Stage.zero1, Stage.zero2, Stage.zero1_or_2)

    @property
    def calls_per_step(self) -> int:
        """Calls in one step, or in one micro-step if no call marks the end of a step; 0: not known yet."""
        return self._cutter.period

    def add_records(self, block: npt.NDArray[np.void]) -> bool:
        """Take in rank 0's records (OBSERVATION_FIELDS) in order; True if `shown` has changed.

        A timed collective comes twice: as a decision and, later, as a timed record with its start. Without timed
        records, the decisions are the sequence. If only decisions come among timed records, their times will follow.
        """
        timed = (block["flags"] & FLAG_TIMED) != 0
        if timed.any():
            self._n_untimed = 0
            block = block[timed]
            block = block[np.argsort(block["start_ns"], kind="stable")]
        elif self._n_untimed is not None and self._n_untimed + len(block) <= MAX_UNTIMED:
            self._n_untimed += len(block)
            return False
        else:
            self._n_untimed = None
        return self.add(
            block["collective"].astype(np.int64),
            block["message_bytes"].astype(np.int64),
            block["start_ns"] / 1e3,
            int(block["step"][-1]) if len(block) else 0,
            block["comm_id"],
        )

    def add(
        self,
        collectives: Ints,
        message_bytes: Ints,
        start_us: Floats,
        step: int = 0,
        comm_ids: npt.NDArray[np.uint64] | None = None,
    ) -> bool:
        """Take in collectives in order; returns whether `shown` has changed. Arrays have the shape [n].

        A `start_us` of 0 is unknown. `step` is the number of the job's step of the last call; it stays the same if
        nobody counts steps.
        """
        if comm_ids is not None:
            self._groups.add(collectives, message_bytes, comm_ids)
        seen = IS_SEEN[collectives & 15]
        if not seen.all():
            collectives, message_bytes, start_us = collectives[seen], message_bytes[seen], start_us[seen]
        if not len(collectives):
            return False
        self.n_calls += len(collectives)
        if start_us[0] > 0:
            gaps_us = np.diff(start_us, prepend=self._last_start_us or start_us[0])
            self._last_start_us = float(start_us[-1])
        else:
            gaps_us = np.zeros(len(start_us))
        codes, gaps_us = self._interruptions.passed(encode(collectives, message_bytes), gaps_us)
        if not len(codes):
            return False
        is_another = self._cutter.add(codes, gaps_us)
        if self._cutter.n_alike < self._n_alike or is_another:
            self._alike_since = step
        self._n_alike = self._cutter.n_alike
        has_held = self._n_alike and step - self._alike_since >= STEPS_TO_EXPECT
        if is_another or (has_held and not self._interruptions.is_watching):
            self._interruptions.expect(self._cutter.window[0] if has_held else NOTHING)
        if is_another:
            codes = self._cutter.window[0]
            judged = UNKNOWN if self._may_be_a_block(codes) else self._judge(Step(*self._cutter.window))
            self._judged = unambiguous(judged, codes, self._groups.of(codes))
        elif not self._cutter.period and len(self._cutter.codes) >= self._judged_uncut_at:
            self._judged_uncut_at = 2 * len(self._cutter.codes)
            self._judged = self._judge(Step(self._cutter.codes, np.zeros(len(self._cutter.codes))))
        return self._show(UNKNOWN if self._cutter.is_over else self._judged)

    def _may_be_a_block(self, codes: Ints) -> bool:
        """Whether this may be sequence parallelism in a block or micro-step: one size is gathered and scattered again.

        A block's few calls repeat among others; one unit under ZeRO-3 has the same calls, but no others.
        """
        large = codes[codes >> 4 > TINY_BYTES]
        if len(np.unique(large >> 4)) != 1 or set((large & 15).tolist()) != _BOTH_WAYS:
            return False
        if len(large) > BLOCK_CALLS:
            return come_back_soon(large & 15 == Collective.all_gather)
        history = self._cutter.codes
        large = history[history >> 4 > TINY_BYTES]
        return float(np.mean(large[len(codes) :] == large[: -len(codes)])) < ALIKE_SHARE

    def _judge(self, step: Step) -> Shown:
        if len(step.roles) < 2 or (step.roles == TINY).all():
            return UNKNOWN  # one repeated call, or only counters and flags, may be any training
        if step.n_flags_in_a_row > MAX_FLAGS or self._encoder is None:
            return UNKNOWN
        return decide(self._encoder.scores(step), step)

    def _show(self, shown: Shown) -> bool:
        if shown == self.shown:
            return False
        _log.info("the collectives show: %s (before: %s)", shown, self.shown)
        self.shown = shown
        return True


class _Communicators:
    """The communicators of the newest calls, as many as the cutter's history has."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[Ints, npt.NDArray[np.uint64]]] = deque()
        self._n_calls = 0
        self._exchanges = False

    def add(self, collectives: Ints, message_bytes: Ints, comm_ids: npt.NDArray[np.uint64]) -> None:
        """Keep these calls in place of the oldest."""
        self._exchanges |= bool((collectives == Collective.all_to_all).any())
        self._blocks.append((encode(collectives, message_bytes), comm_ids.copy()))  # not the whole frame
        self._n_calls += len(collectives)
        while self._n_calls - len(self._blocks[0][0]) >= MAX_CALLS:
            self._n_calls -= len(self._blocks.popleft()[0])

    def of(self, codes: Ints) -> Groups:
        """The communicators of each of these calls; empty if experts may use their own for gradients."""
        if self._exchanges or not self._blocks:
            return NO_GROUPS
        known, comm_ids = (np.concatenate(parts) for parts in zip(*self._blocks, strict=True))
        return {code: set(comm_ids[known == code].tolist()) for code in np.unique(codes).tolist()}
