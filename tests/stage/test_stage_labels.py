"""Labels claim no more than the recorded sequences show, and different training is told apart where it can be."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from benchmarks.fingerprint.corpus.dataset import SETTLED_STEP, Sequence, generated, hypothetical, recorded
from benchmarks.fingerprint.corpus.training_kind import TrainingKind, visible
from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.ambiguity import unambiguous
from zerotune.tuner.fingerprint.labels import POSSIBLE, UNKNOWN, Shown
from zerotune.tuner.fingerprint.steps.anatomy import TINY_BYTES, encode


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


def scaled(one: Sequence) -> list[int]:
    """A step with sizes in thousandths of the largest and small calls in a row as one: neither scale nor flags tell."""
    codes = one.codes()[one.step(SETTLED_STEP)]
    n_bytes = codes >> 4
    relative = np.rint(1000 * n_bytes / n_bytes.max()).astype(np.int64)
    calls = np.where(n_bytes <= TINY_BYTES, -1, relative << 4 | codes & 15)
    return calls[(calls != -1) | (np.roll(calls, 1) != -1)].tolist() or [-1]


@pytest.mark.slow
def test_runs_of_any_origin_with_the_same_sequence_have_the_same_label(recordings: list[Sequence]) -> None:
    by_sequence = defaultdict(list)
    for one in [*recordings, *generated(20, 9), *hypothetical(3000, 9)]:
        if visible(one.training) != UNKNOWN:  # what is no training may differ from it in its flags
            by_sequence[rotated(scaled(one))].append(one)
    shared = [group for group in by_sequence.values() if len({visible(one.training) for one in group}) > 1]
    assert len(shared) > 2, "there is nothing to compare"
    for group in shared:
        assert len({one.shown for one in group}) == 1, [(one.origin, one.name, str(one.shown)) for one in group]


E = pytest.param
AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
KiB, MiB = 1 << 10, 1 << 20
Calls = list[tuple[Collective, int]]


def codes_of(calls: Calls) -> np.ndarray:
    kinds, n_bytes = (np.array(column, np.int64) for column in zip(*calls, strict=True))
    return encode(kinds, n_bytes)


@pytest.mark.parametrize(
    ("calls", "kinds", "shown"),
    [
        E(
            [(AR, MiB)] * 8 + [(AR, 3 * MiB)],
            [Shown(Stage.ddp), Shown(Stage.ddp, tensor_parallel=True)],
            Shown(Stage.ddp, tensor_parallel=None), id="equal buckets, or activations and one bucket",
        ),
        *(
            E(
                [(AR, MiB)] * n + [(AR, 3 * MiB)],
                [Shown(Stage.ddp), Shown(Stage.ddp, tensor_parallel=True)],
                Shown(Stage.ddp, tensor_parallel=None), id=f"{n} of them: embeddings are summed once, frozen ones less",
            )
            for n in (5, 7, 23, 47, 115)
        ),
        E(
            [(AR, MiB)] * 8 + [(AR, 4)],
            [Shown(Stage.ddp), Shown(Stage.ddp, True), Shown(tensor_parallel=True)],
            Shown(tensor_parallel=None), id="equal buckets, one per micro-step, or activations alone",
        ),
        E(
            [(RS, MiB)] * 4 + [(AG, MiB)] * 2,
            [Shown(Stage.zero1_or_2), Shown(Stage.zero2, True)],
            Shown(Stage.zero1_or_2), id="wider elements, or two micro-steps",
        ),
        E(
            [(AG, MiB)] * 4 + [(RS, MiB)] * 2,
            [Shown(Stage.zero1, True), Shown(Stage.zero3)], Shown(), id="two micro-steps, or gathered again",
        ),
        E(
            [(AR, MiB)] * 40 + [(AG, 20 * MiB)],
            [Shown(tensor_parallel=True), Shown(Stage.zero1_or_2)], Shown(tensor_parallel=None), id="or inference",
        ),
        E(
            [(AR, MiB)] * 40 + [(AG, 10 * MiB)],
            [Shown(tensor_parallel=True), Shown(Stage.zero2, True)], Shown(tensor_parallel=None),
            id="four micro-steps, or inference",
        ),
        E(
            [*[(AG, 3 * MiB), (AG, MiB), (AG, MiB)] * 2, (RS, MiB), (RS, MiB), (RS, 3 * MiB)],
            [Shown(Stage.zero1, True), Shown(Stage.zero3), Shown(Stage.zero3, False)], Shown(),
            id="a series in two micro-steps, or again for backward",
        ),
    ],
)  # fmt: skip
def test_sequences_that_several_kinds_enqueue(calls: Calls, kinds: list[Shown], shown: Shown) -> None:
    for shift in (0, 1, 5):
        assert {unambiguous(kind, np.roll(codes_of(calls), shift)) for kind in kinds} == {shown}


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


def test_what_is_possible_is_what_some_kind_of_training_shows() -> None:
    kinds = [
        TrainingKind(stage, n_micro, *flags)
        for stage in (Stage.unknown, Stage.ddp, Stage.zero1, Stage.zero2, Stage.zero3)
        for n_micro in (1, 2)
        for flags in product((False, True), repeat=6)
    ]
    # Activations are partitioned among the ranks that compute them; only ZeRO-1 broadcasts parameters.
    kinds = [
        kind
        for kind in kinds
        if kind.tensor_parallel >= kind.partitioned_activations and (kind.stage is Stage.zero1) >= kind.broadcasts
    ]
    assert {visible(kind) for kind in kinds} == set(POSSIBLE)
