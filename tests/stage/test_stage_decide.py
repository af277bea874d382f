"""What scores come to: never what cannot be, and what is counted is not guessed."""

from __future__ import annotations

import numpy as np
import pytest
from given_steps import step_of
from hypothesis import given
from hypothesis import strategies as st

from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.encoding.encoders import decide
from zerotune.tuner.fingerprint.labels import ACCUMULATIONS, N_OUTPUTS, POSSIBLE, STAGES, Shown
from zerotune.tuner.fingerprint.steps.anatomy import Step

AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
SCORES = st.lists(st.floats(-50, 50), min_size=N_OUTPUTS, max_size=N_OUTPUTS).map(np.array)


def partitioned(n_micro_steps: int) -> Step:
    """Two blocks under tensor parallelism with P_a, and a bucket in the last micro-step; volumes that prove nothing."""
    act, part = (AR, 1 << 15), (AG, 1 << 15)
    micro = [*[act] * 4, part, *[act] * 4, part, *[act] * 4]
    return step_of(*micro * n_micro_steps, (RS, 1 << 24), (AR, 4), (AG, 3 << 22))


PLAIN = step_of((RS, 1 << 20), (RS, 1 << 21), (AR, 4), (AG, 3 << 20))


def scores(stage: float, accumulation: float, tensor: float, partitioned: float, of: Shown) -> np.ndarray:
    result = np.zeros(N_OUTPUTS)
    result[STAGES.index(of.stage)] = stage
    result[len(STAGES) + ACCUMULATIONS.index(of.accumulation)] = accumulation
    result[-2:] = partitioned, tensor
    return result


@given(SCORES, st.integers(0, 3))
def test_only_what_can_be_shown_is(values: np.ndarray, n_micro_steps: int) -> None:
    shown = decide(values, partitioned(n_micro_steps) if n_micro_steps else PLAIN)
    assert shown in POSSIBLE
    if not n_micro_steps:
        assert not shown.partitioned_activations
        assert not shown.tensor_parallel
    elif shown.partitioned_activations:
        assert shown.accumulation is not (n_micro_steps == 1)


def test_an_accumulation_that_the_stage_cannot_show_gives_way() -> None:
    """ZeRO-1 or 2 without partitioned activations never shows that it does not accumulate."""
    sure = scores(9.0, 1.0, -5.0, -5.0, Shown(Stage.zero1_or_2, False))
    assert decide(sure, PLAIN) == Shown(Stage.zero1_or_2)


@pytest.mark.parametrize("n_micro_steps", [1, 2, 5])
def test_micro_steps_that_can_be_counted_are_not_guessed(n_micro_steps: int) -> None:
    for guessed in (False, True):
        values = scores(5.0, 2.0, 5.0, 5.0, Shown(Stage.zero3, guessed))
        assert decide(values, partitioned(n_micro_steps)) == Shown(Stage.zero3, n_micro_steps > 1, True, True)


def test_zero3_with_a_flag_per_step_shows_its_micro_steps() -> None:
    """It gathers in each of them, so whether there are several can be told; without a flag it may be neither."""
    calls = [(AG, 1 << 20), (AG, 1 << 21), (AG, 1 << 20), (RS, 1 << 21), (RS, 1 << 20)]
    unsure = scores(9.0, 1.0, -5.0, -5.0, Shown(Stage.zero3))
    assert decide(unsure, step_of(*calls)) == Shown(Stage.zero3)
    assert decide(unsure, step_of(*calls, (AR, 4))).accumulation is not None


def test_what_is_broadcast_once_was_not_sent_twice_if_it_is_as_much() -> None:
    guess = scores(9.0, 1.0, -5.0, -5.0, Shown(Stage.zero1, True))
    sent = [(AR, 1 << 21)]
    broadcasts = [(Collective.broadcast, 1 << 20)] * 2
    assert decide(guess, step_of(*sent, *broadcasts)) == Shown(Stage.zero1)
    assert decide(guess, step_of(*sent * 2, (AR, 4), *broadcasts)) == Shown(Stage.zero1, True)


def test_who_sends_in_every_micro_step_sends_the_same_each_time() -> None:
    guess = scores(9.0, 3.0, -5.0, -5.0, Shown(Stage.zero2, True))
    sent = [(AR, 3 << 20), *[(AR, 2 << 20), (AR, 1 << 20)] * 4]
    back = [(AR, 4), (AG, 15 << 19)]
    assert decide(guess, step_of(*sent, *back)) == Shown(Stage.zero1_or_2)
    assert decide(guess, step_of(*sent, *sent, *back)) == Shown(Stage.zero2, True)
    guess = scores(9.0, 3.0, -5.0, -5.0, Shown(Stage.ddp, True))
    assert decide(guess, step_of(*sent, (AR, 4))) == Shown(Stage.ddp)
    assert decide(guess, step_of(*sent, *sent, (AR, 4))) == Shown(Stage.ddp, True)


def test_under_tensor_parallelism_gradients_may_leave_once_and_micro_steps_show() -> None:
    guess = scores(9.0, 3.0, 9.0, 9.0, Shown(Stage.ddp, True))
    act, part = (AR, 1 << 15), (AG, 1 << 15)
    micro = [*[act] * 4, part, *[act] * 4, part, *[act] * 4]
    assert decide(guess, step_of(*micro * 2, (AR, 1 << 24), (AR, 4))) == Shown(Stage.ddp, True, True, True)


def test_counted_micro_steps_are_never_left_open() -> None:
    for stage in (Stage.ddp, Stage.zero1_or_2, Stage.zero2):
        unsure = scores(9.0, 3.0, 9.0, 9.0, Shown(stage))
        assert decide(unsure, partitioned(2)).accumulation is True


def test_a_flag_tells_one_micro_step_and_buffers_that_are_broadcast_before_each_forward_do_not() -> None:
    act, part = (AR, 1 << 15), (AG, 1 << 15)
    micro = [*[act] * 4, part, *[act] * 4, part, *[act] * 4, (AR, 1 << 24)]
    buffers = [(Collective.broadcast, 512), (Collective.broadcast, 64)]
    open_, told = Shown(Stage.ddp, None, True, True), Shown(Stage.ddp, False, True, True)
    for guess in (open_, told):
        values = scores(9.0, 3.0, 9.0, 9.0, guess)
        assert decide(values, step_of(*micro)) == open_
        assert decide(values, step_of(*buffers, *micro)) == open_
        assert decide(values, step_of(*micro, (AR, 4))) == told


def test_activations_are_summed_in_forward_too_where_nothing_is_sent() -> None:
    """Equal buckets that come by twos and threes between others are not."""
    guess = scores(9.0, 9.0, 9.0, -9.0, Shown(Stage.ddp))
    alike = (AR, 3 << 20)
    buckets = [(AR, 1 << 20), *[alike] * 3, *[(AR, 5 << 20), alike, alike] * 8, (AR, 2 << 20)]
    assert step_of(*buckets).activations is not None
    assert not decide(guess, step_of(*buckets)).tensor_parallel
    summed = [*[alike] * 8, (AR, 1 << 20), *[(AR, 5 << 20), alike, alike] * 4, (AR, 2 << 20)]
    assert decide(guess, step_of(*summed)).tensor_parallel


def test_sequence_parallelism_is_seen_beside_a_model_in_one_call() -> None:
    guess = scores(9.0, 9.0, 9.0, -9.0, Shown(Stage.zero1_or_2))
    pairs = [(AG, 1 << 19), (RS, 1 << 19)] * 24
    assert decide(guess, step_of(*pairs, (RS, 1 << 32), (AG, 1 << 31))).tensor_parallel
    assert not decide(guess, step_of((RS, 1 << 32), (AG, 1 << 31))).tensor_parallel


def test_what_is_not_probable_enough_is_unknown() -> None:
    assert decide(np.zeros(N_OUTPUTS), PLAIN).stage is Stage.unknown
