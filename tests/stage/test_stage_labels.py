"""Labels claim no more than the recorded sequences show, and different training is told apart where it can be."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.ambiguity import unambiguous
from zerotune.tuner.fingerprint.labels import Shown
from zerotune.tuner.fingerprint.steps.anatomy import encode

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
