"""Labels claim no more than the recorded sequences show, and different training is told apart where it can be."""

from __future__ import annotations

from collections import defaultdict

import pytest

from benchmarks.fingerprint.corpus.dataset import SETTLED_STEP, Sequence, recorded
from benchmarks.fingerprint.corpus.training_kind import TrainingKind, visible
from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.labels import Shown


@pytest.fixture(scope="module")
def recordings() -> list[Sequence]:
    return recorded()


def rotated(codes: list[int]) -> tuple[int, ...]:
    """The same for all rotations of one cycle, and for several rounds of it."""
    n = len(codes)
    period = next(p for p in range(1, n + 1) if n % p == 0 and codes[p:] + codes[:p] == codes)
    cycle = codes[:period]
    first = min(cycle)
    return min(tuple(cycle[at:] + cycle[:at]) for at, code in enumerate(cycle) if code == first)


def test_recordings_with_the_same_sequence_have_the_same_label(recordings: list[Sequence]) -> None:
    by_sequence = defaultdict(list)
    for one in recordings:
        codes = one.codes()[one.step(SETTLED_STEP)].tolist()
        by_sequence[rotated(codes)].append(one)
    shared = [group for group in by_sequence.values() if len({one.training for one in group}) > 1]
    assert len(shared) > 20, "there is nothing to compare"
    for group in shared:
        shown = {one.shown for one in group}
        assert len(shown) <= 1, [(one.name, str(one.shown)) for one in group]


E = pytest.param
AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
KiB, MiB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("training", "shown"),
    [
        E(TrainingKind(Stage.ddp), Shown(Stage.ddp), id="ddp"),
        E(TrainingKind(Stage.ddp, 4, has_marker=True), Shown(Stage.ddp), id="no_sync"),
        E(TrainingKind(Stage.ddp, 4, sends_each=True, has_marker=True), Shown(Stage.ddp, True), id="each"),
        E(TrainingKind(Stage.ddp, 4, sends_each=True), Shown(Stage.ddp), id="each, unmarked"),
        E(TrainingKind(Stage.zero1), Shown(Stage.zero1_or_2), id="zero1"),
        E(TrainingKind(Stage.zero1, broadcasts=True), Shown(Stage.zero1), id="broadcasts"),
        E(TrainingKind(Stage.zero2, 1, True, True), Shown(Stage.zero1_or_2), id="zero2"),
        E(TrainingKind(Stage.zero2, 4, sends_each=True), Shown(Stage.zero2, True), id="zero2 each"),
        E(TrainingKind(Stage.zero3, 1, True, True), Shown(Stage.zero3), id="zero3 unmarked"),
        E(TrainingKind(Stage.zero3, 1, True, True, True), Shown(Stage.zero3, False), id="zero3 marked"),
        E(TrainingKind(Stage.zero3, 4, True, True), Shown(Stage.zero3), id="zero3 each, unmarked"),
        E(TrainingKind(Stage.zero3, 4, False, True), Shown(Stage.zero3, True), id="zero3 last only"),
        E(TrainingKind(Stage.zero3, 4, True, True, False, True, True), Shown(Stage.zero3, None, True, True),
          id="micro-steps that show, but no step"),
        E(TrainingKind(Stage.zero3, 4, True, True, True, True, True), Shown(Stage.zero3, True, True, True),
          id="micro-steps that P_a shows"),
    ],
)  # fmt: skip
def test_what_is_visible(training: TrainingKind, shown: Shown) -> None:
    assert visible(training) == shown
