"""What the fingerprint shows of recorded training, from anywhere in it, and after changes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.fingerprint.corpus.dataset import Sequence, recorded
from benchmarks.fingerprint.evaluation import changes_noticed, feed, recognised
from zerotune.store.records import Collective, Stage
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder
from zerotune.tuner.fingerprint.encoding.weights import default_encoder
from zerotune.tuner.fingerprint.labels import UNKNOWN

AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce


@pytest.fixture(scope="module")
def recordings() -> list[Sequence]:
    """A third of them: `python -m benchmarks stage_fingerprint` judges by all."""
    return recorded()[::3]


@pytest.fixture(scope="module")
def lstm() -> LstmEncoder:
    encoder = default_encoder()
    assert encoder is not None
    return encoder


def calls(*steps: tuple[Collective, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([c for c, _ in steps], np.int64), np.array([n for _, n in steps], np.int64)


def add(fingerprint: StageFingerprint, step: list[tuple[Collective, int]], n_steps: int) -> None:
    kinds, n_bytes = calls(*step)
    for _ in range(n_steps):
        fingerprint.add(kinds, n_bytes, np.zeros(len(kinds)))


def zero3(n_layers: int, n_bytes: int) -> list[tuple[Collective, int]]:
    backward = [call for _ in range(n_layers) for call in ((AG, n_bytes), (RS, n_bytes))]
    return [(AG, 3 * n_bytes), *[(AG, n_bytes)] * n_layers, *backward, (RS, 3 * n_bytes), (AR, 4)]


def ddp(n_buckets: int, n_bytes: int) -> list[tuple[Collective, int]]:
    return [(AR, 1 << 20), *[(AR, n_bytes + 512 * i) for i in range(n_buckets)]]


def test_recorded_frameworks_are_recognised_within_two_steps(recordings: list[Sequence], lstm: LstmEncoder) -> None:
    accuracy = recognised(lstm, recordings, 11)
    assert accuracy.stage_percent >= 99.0, accuracy.mistakes[:5]
    assert accuracy.percent >= 99.0, accuracy.mistakes[:5]


def test_a_change_is_noticed_within_two_steps(recordings: list[Sequence], lstm: LstmEncoder) -> None:
    accuracy = changes_noticed(lstm, recordings, 100, 12)
    assert accuracy.percent >= 99.0, accuracy.mistakes[:5]


def test_from_the_first_call_of_a_job_on(recordings: list[Sequence], lstm: LstmEncoder) -> None:
    """With everything that frameworks send before the first step, and first steps unlike the later ones."""
    n_right = 0
    for one in recordings[::4]:
        fingerprint = StageFingerprint(lstm)
        feed(fingerprint, one.codes(), one.gaps_us(), np.random.default_rng(0))
        n_right += fingerprint.shown == one.shown
    assert n_right >= 0.99 * len(recordings[::4])


def test_one_call_over_and_over_is_unknown(lstm: LstmEncoder) -> None:
    fingerprint = StageFingerprint(lstm)
    add(fingerprint, [(AR, 1 << 27)], 100)
    assert fingerprint.shown == UNKNOWN


def test_the_daemon_needs_no_torch_to_recognise() -> None:
    code = (
        "import sys, numpy as np; from zerotune.tuner.fingerprint import StageFingerprint; f = StageFingerprint();"
        "f.add(np.tile([2, 2, 3], 9), np.tile([1 << 20, 1 << 21, 1 << 20], 9), np.zeros(27));"
        "assert f.calls_per_step == 3; import zerotune.tuner.service.daemon, zerotune.tuner.learning.brain;"
        "print(*({'torch', 'sklearn', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_after_training_has_ended_nothing_is_claimed(lstm: LstmEncoder) -> None:
    """What follows shares no call with it and never repeats; when training goes on, it is known at once."""
    fingerprint = StageFingerprint(lstm)
    add(fingerprint, zero3(6, 1 << 22), 5)
    kinds, n_bytes = calls(*[(AG, (1 << 20) + 512 * i) for i in range(64)])
    fingerprint.add(kinds, n_bytes, np.zeros(64))
    assert fingerprint.shown == UNKNOWN
    add(fingerprint, zero3(6, 1 << 22), 3)
    assert fingerprint.stage is Stage.zero3


ACTIVATION, BUCKET = 16 << 20, 160 << 20


def megatron_step(
    n_layers: int, n_micro: int, *, sequence_parallel: bool, optimizer: bool, is_last: bool
) -> list[tuple[Collective, int]]:
    """One step of a pipeline's stage as Megatron sends it.

    With sequence parallelism, backward gathers the gradient and the input before it scatters. What stages send to each
    other NCCL asks no tuner about.
    """
    if sequence_parallel:
        forward, backward = [(AG, ACTIVATION), (RS, ACTIVATION)] * 2, [*[(AG, ACTIVATION)] * 2, (RS, ACTIVATION)] * 2
        begin = [(RS, ACTIVATION)]
    else:
        forward = backward = [(AR, ACTIVATION)] * 2
        begin = [(AR, ACTIVATION)]
    loss = [(AR, 8192)] * 3 if is_last else []
    micro = [*([] if is_last else begin), *forward * n_layers, *loss, *backward * n_layers]
    send = RS if optimizer else AR
    tied = [] if optimizer else [(AR, 410 << 20)]
    after = [(AG, BUCKET // 2)] * 20 + [(AG, 33 << 20)] if optimizer else []
    return [*micro * n_micro, *[(send, BUCKET)] * 20, (send, 66 << 20), *tied, (AR, 4), *after]


@pytest.mark.parametrize("n_micro", [1, 8])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatrons_activations_are_no_parameters(
    n_micro: int, is_last: bool, optimizer: bool, sequence_parallel: bool
) -> None:
    step = megatron_step(12, n_micro, sequence_parallel=sequence_parallel, optimizer=optimizer, is_last=is_last)
    fingerprint = StageFingerprint()
    add(fingerprint, step, 4)
    wanted = (Stage.zero1, Stage.zero2, Stage.zero1_or_2) if optimizer else (Stage.ddp,)
    assert fingerprint.stage in wanted
    assert fingerprint.shown.tensor_parallel is not False
    if sequence_parallel:
        assert fingerprint.shown.tensor_parallel


def megatron_records(step: list[tuple[Collective, int]], *, has_experts: bool = False) -> np.ndarray:
    """Records of a step: activations and the loss go to ranks that hold parts of a layer, buckets to replicas."""
    kinds, n_bytes = calls(*step, *([(Collective.all_to_all, ACTIVATION)] * 4 if has_experts else []))
    block = np.zeros(len(kinds), np.dtype(OBSERVATION_FIELDS))
    block["collective"], block["message_bytes"] = kinds, n_bytes
    block["comm_id"] = np.where(n_bytes <= ACTIVATION, 7, 8)
    return block


@pytest.mark.parametrize("n_micro", [1, 8])
@pytest.mark.parametrize("n_layers", [2, 12])
def test_all_reduces_among_other_ranks_than_the_buckets_are_activations(n_layers: int, n_micro: int) -> None:
    """In the middle of a pipeline nothing but the ranks tells one row of activations from one of buckets."""
    step = [*[(AR, ACTIVATION)] * 4 * n_layers * n_micro, *[(AR, BUCKET)] * 5, (AR, 66 << 20), (AR, 4)]
    block = megatron_records(step)
    of_one_group, exchanging = block.copy(), megatron_records(step, has_experts=True)
    of_one_group["comm_id"] = 7
    for records, wanted in (block, True), (of_one_group, None), (exchanging, None):
        fingerprint = StageFingerprint()
        for _ in range(4):
            fingerprint.add_records(records)
        assert (fingerprint.stage, fingerprint.shown.tensor_parallel) == (Stage.ddp, wanted)
