"""What is taken out of a step before an encoder sees it, and what is counted: exactly, from made-up steps."""

from __future__ import annotations

import numpy as np

from zerotune.store.records import Collective
from zerotune.tuner.fingerprint.corpus.dataset import SETTLED_STEP, generated, recorded
from zerotune.tuner.fingerprint.encoding.features import micro_steps_shown, summary
from zerotune.tuner.fingerprint.steps.anatomy import Step, encode

AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
Calls = list[tuple[Collective, int]]


def step_of(calls: Calls) -> Step:
    kinds, n_bytes = (np.array(column, np.int64) for column in zip(*calls, strict=True))
    return Step(encode(kinds, n_bytes), np.zeros(len(calls)))


def sharded(n: int, sent: Calls, between: Calls) -> Calls:
    backward = [call for _ in range(n) for call in ((AG, 1 << 20), *between, *sent)]
    return [*[call for _ in range(n) for call in ((AG, 1 << 20), *between)], *backward, (AR, 4)]


def test_hybrid_sharding_looks_like_sharding() -> None:
    """The sum over replicas is half of a send, with and without gaps, wherever the step is cut."""
    plain, hybrid = (sharded(6, [(RS, 1 << 20), *more], []) for more in ([], [(AR, 1 << 18)]))
    for shift in (0, 1, 8):
        rotated = hybrid[shift:] + hybrid[:shift]
        np.testing.assert_array_equal(summary(step_of(rotated)), summary(step_of(plain)))


def test_micro_steps_are_counted_exactly_where_activations_are_partitioned() -> None:
    """From one block on, in every framework that was recorded or generated."""
    n_seen = 0
    for one in [*recorded(), *generated(12, 3)]:
        if not one.training.partitioned_activations:
            continue
        where = one.step(SETTLED_STEP)
        step = Step(one.codes()[where], np.zeros(where.stop - where.start))
        assert micro_steps_shown(step) == one.training.n_micro, one.name
        n_seen += 1
    assert n_seen > 50
