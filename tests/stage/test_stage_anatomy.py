"""What is taken out of a step before an encoder sees it, and what is counted: exactly, from made-up steps."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.store.records import Collective
from zerotune.tuner.fingerprint.corpus.dataset import SETTLED_STEP, generated, recorded
from zerotune.tuner.fingerprint.encoding.features import Sizes, micro_steps_shown, same_pieces, summary
from zerotune.tuner.fingerprint.steps.anatomy import GATHER, REDUCE, Step, encode

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


def test_activations_after_a_scatter_are_no_replica_sums() -> None:
    """In forward they follow no scatter."""
    activations = step_of(sharded(6, [(RS, 1 << 20)], [(AR, 1 << 18)] * 2)).activations
    assert activations is not None
    assert activations.roles.tolist() == [REDUCE] * 24


def test_sequence_parallelism_is_no_sharding() -> None:
    """What each half of a block gathers and scatters leaves the rest, parameters gathered twice do not."""
    pairs: Calls = [(AG, 1 << 18), (RS, 1 << 18)] * 4
    step = step_of([*pairs * 4, (RS, 1 << 24), (AG, 1 << 24), (AR, 4)])
    assert step.activations is not None
    assert len(step.rest.roles) == 3
    assert step_of(sharded(6, [(RS, 1 << 20)], [])).activations is None
    one_unit: Calls = [(AG, 1 << 22), (AG, 1 << 20), (RS, 1 << 20), (RS, 1 << 22)] * 8
    assert step_of([*one_unit, (AR, 4)]).activations is None


def test_partitioned_activations_are_found_beside_any_number_of_buckets() -> None:
    forward, backward = [(AR, 1 << 15)] * 4, [(AG, 1 << 15), *[(AR, 1 << 15)] * 4]
    step = step_of([*forward, *backward * 2, *[(AR, 1 << 20)] * 64, (AG, 1 << 26)])
    assert step.activations is not None
    assert np.count_nonzero(step.activations.roles == GATHER) == 2


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


@pytest.mark.parametrize("octave", [0, 1, -1])
def test_pieces_gathered_more_often_than_sent_are_seen(octave: int) -> None:
    """Two of three pieces once, the third twice, whatever the types of elements."""
    gathers, sends = np.array([512, 1024, 4096, 4096]), np.array([512, 1024, 4096])
    scale = 2.0**octave
    share, kind, fewest, most, _, often = same_pieces(Sizes(gathers), Sizes((sends * scale).astype(np.int64)))
    assert (share, kind, 4 * fewest, 4 * most) == (1.0, octave / 2, 0.0, 1.0)
    assert often == pytest.approx(4096 / 5632)


def test_activations_are_seen_beside_more_equal_chunks_of_gradients() -> None:
    forward, backward = [(AR, 1 << 18)] * 8, [(AR, 3 << 18), (AR, 1 << 18), (AR, 1 << 18)] * 4
    step = step_of([*forward, *backward, *[(AR, 3 << 18)] * 16, *[(AG, 3 << 18)] * 20])
    assert step.activations is not None
    assert set(step.activations.bytes.tolist()) == {1 << 18}
