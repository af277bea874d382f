"""How often the fingerprint is right on sequences that its encoder has not seen. Nothing here trains."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from benchmarks.fingerprint.corpus.dataset import SETTLED_STEP, Sequence, disturbed
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder
from zerotune.tuner.fingerprint.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.labels import Shown
from zerotune.tuner.fingerprint.steps.anatomy import Floats, Ints

STEPS_ALLOWED = 2
SLACK = 1.0
"""Share of two steps after which the answer is read: a search begins only when 5 % of the steps are new."""


@dataclass
class Accuracy:
    n: int = 0
    n_right: int = 0
    """Answers right in stage, accumulation, partitioned activations and tensor parallelism."""
    n_stage: int = 0
    mistakes: list[tuple[str, Shown, Shown]] = field(default_factory=list)
    """(sequence, true, shown)."""

    def add(self, name: str, truth: Shown, shown: Shown) -> None:
        self.n += 1
        self.n_right += truth == shown
        self.n_stage += truth.stage is shown.stage
        if truth != shown:
            self.mistakes.append((name, truth, shown))

    @property
    def percent(self) -> float:
        """Right in all parts."""
        return 100.0 * self.n_right / max(1, self.n)

    @property
    def stage_percent(self) -> float:
        return 100.0 * self.n_stage / max(1, self.n)


def recognised(
    encoder: LstmEncoder | None,
    sequences: Iterable[Sequence],
    seed: int,
    *,
    rate: float = 0.0,
    n_steps: float = STEPS_ALLOWED,
) -> Accuracy:
    """How many sequences are recognised from a random place in mid-training on.

    Args:
        encoder: None: rules.
        sequences: that the encoder has not seen.
        rate: share of calls to disturb, see `disturbed`.
        n_steps: steps after which the answer is read.
    """
    rng = np.random.default_rng(seed)
    accuracy = Accuracy()
    for sequence in sequences:
        fingerprint = StageFingerprint(encoder)
        codes, gaps_us = middle(sequence, rng, n_steps)
        if rate:
            codes, gaps_us = disturbed(codes, gaps_us, rng, rate)
        feed(fingerprint, codes, gaps_us, rng)
        accuracy.add(sequence.name, sequence.shown, fingerprint.shown)
    return accuracy


def changes_noticed(
    encoder: LstmEncoder | None,
    sequences: Many[Sequence],
    n_pairs: int,
    seed: int,
    after: Many[Sequence] | None = None,
) -> Accuracy:
    """How many changes from one kind of training to another are shown after two steps of the other.

    Args:
        encoder: None: rules.
        n_pairs: number of changes; both sequences of a pair have different labels.
        after: the second sequences of the pairs; None: `sequences`.
    """
    rng = np.random.default_rng(seed)
    accuracy = Accuracy()
    while accuracy.n < n_pairs:
        first, second = (ones[int(rng.integers(len(ones)))] for ones in (sequences, after or sequences))
        if first.shown == second.shown:
            continue
        fingerprint = StageFingerprint(encoder)
        feed(fingerprint, *middle(first, rng, 2.5), rng)
        feed(fingerprint, *middle(second, rng, STEPS_ALLOWED), rng)
        accuracy.add(f"{first.name} -> {second.name}", second.shown, fingerprint.shown)
    return accuracy


def middle(sequence: Sequence, rng: np.random.Generator, n_steps: float) -> tuple[Ints, Floats]:
    """Codes and gaps (us), each [n], from a random place of the settled steps on; too few steps are repeated.

    Args:
        n_steps: with a fraction.
    """
    settled = sequence.step(min(SETTLED_STEP, len(sequence.step_starts) - 1))
    length = settled.stop - settled.start
    start = settled.start + int(rng.integers(0, length))
    n_calls = int(np.ceil(SLACK * n_steps * length)) + 1
    codes, gaps_us = sequence.codes()[settled.start :], sequence.gaps_us()[settled.start :]
    n_rounds = -(-(n_calls + start - settled.start) // len(codes))
    cut = slice(start - settled.start, start - settled.start + n_calls)
    return np.tile(codes, n_rounds)[cut], np.tile(gaps_us, n_rounds)[cut]


def feed(fingerprint: StageFingerprint, codes: Ints, gaps_us: Floats, rng: np.random.Generator) -> None:
    """Feed calls in blocks of random length, as a daemon gets them; half of all jobs have no times.

    Args:
        codes: calls, shape [n].
        gaps_us: time before each, shape [n].
    """
    has_times = rng.random() < 0.5
    start_us = np.cumsum(gaps_us) + 1.0 if has_times else np.zeros(len(codes))
    longest = int(rng.choice([8, 64, 1024]))
    at = 0
    while at < len(codes):
        block = slice(at, at + int(rng.integers(1, longest)))
        fingerprint.add(codes[block] & 15, codes[block] >> 4, start_us[block])
        at = block.stop
