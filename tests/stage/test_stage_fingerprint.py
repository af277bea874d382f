"""What the fingerprint shows of recorded training, from anywhere in it, and after changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fingerprint.corpus.dataset import Sequence, recorded
from benchmarks.fingerprint.evaluation import changes_noticed, feed, recognised
from zerotune.store.records import Collective, Stage
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder
from zerotune.tuner.fingerprint.encoding.features import frames, summary
from zerotune.tuner.fingerprint.encoding.weights import default_encoder
from zerotune.tuner.fingerprint.labels import UNKNOWN
from zerotune.tuner.fingerprint.steps.anatomy import Step, encode
from zerotune.tuner.traces import read_trace

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


@pytest.mark.slow
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


def test_calls_that_no_tuner_is_asked_about_are_left_out(lstm: LstmEncoder) -> None:
    step = zero3(6, 1 << 22)
    plain, mixed = StageFingerprint(lstm), StageFingerprint(lstm)
    add(plain, step, 4)
    add(mixed, [call for one in step for call in (one, (Collective.all_to_all, 1 << 24), (Collective.send, 9))], 4)
    assert plain.shown == mixed.shown
    assert plain.calls_per_step == mixed.calls_per_step == len(step)


def test_one_call_over_and_over_is_unknown(lstm: LstmEncoder) -> None:
    fingerprint = StageFingerprint(lstm)
    add(fingerprint, [(AR, 1 << 27)], 100)
    assert fingerprint.shown == UNKNOWN


def test_the_scale_of_a_model_does_not_matter(lstm: LstmEncoder) -> None:
    small, large = StageFingerprint(lstm), StageFingerprint(lstm)
    add(small, zero3(8, 1 << 20), 3)
    add(large, zero3(8, 1 << 30), 3)
    assert small.shown == large.shown
    assert small.stage is Stage.zero3


def test_the_place_of_a_steps_cut_does_not_matter() -> None:
    kinds, n_bytes = calls(*zero3(5, 1 << 20))
    gaps_us = np.arange(1.0, len(kinds) + 1)
    whole = Step(encode(kinds, n_bytes), gaps_us)
    for shift in range(len(kinds)):
        rotated = Step(encode(np.roll(kinds, shift), np.roll(n_bytes, shift)), np.roll(gaps_us, shift))
        np.testing.assert_allclose(summary(rotated), summary(whole))
        np.testing.assert_allclose(frames(rotated), frames(whole))


def test_the_daemon_needs_no_torch_to_recognise() -> None:
    code = (
        "import sys, numpy as np; from zerotune.tuner.fingerprint import StageFingerprint; f = StageFingerprint();"
        "f.add(np.tile([2, 2, 3], 9), np.tile([1 << 20, 1 << 21, 1 << 20], 9), np.zeros(27));"
        "assert f.calls_per_step == 3; import zerotune.tuner.service.daemon, zerotune.tuner.learning.brain;"
        "print(*({'torch', 'sklearn', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_micro_steps_are_found_within_a_step() -> None:
    """Also where the cut is amid them, and where activations show them although gradients leave in the last only."""
    micro = zero3(5, 1 << 20)[:-1]
    for shift in (0, 3, 9):
        codes = np.roll(encode(*calls(*micro, *micro, *micro, (AR, 4))), shift)
        rounds = Step(codes, np.zeros(len(codes))).rest.rounds
        assert (rounds.n, len(rounds.unit.roles)) == (3, len(micro))
    act, part, sent = (AR, 1 << 15), (AG, 1 << 15), (RS, 1 << 24)
    forward, backward = [act] * 8, [part, act, act, act]
    step = [*forward, *backward * 4, *forward, *backward * 2, sent, *backward, sent, *backward, (AG, 1 << 25)]
    codes = encode(*calls(*step))
    activations = Step(codes, np.zeros(len(codes))).activations
    assert activations is not None
    assert (activations.rounds.n, activations.rounds.coverage) == (2, 1.0)


def test_counters_and_flags_are_unknown(lstm: LstmEncoder) -> None:
    fingerprint = StageFingerprint(lstm)
    add(fingerprint, [(AR, 4), (AR, 8), (AG, 256), (AR, 4)], 20)
    assert fingerprint.shown == UNKNOWN


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


@pytest.mark.parametrize(("n_replicas", "wanted"), [(2, True), (4, None)])
def test_groups_without_names_are_told_apart_by_their_sizes(tmp_path: Path, n_replicas: int, wanted: bool) -> None:
    """Four ranks hold parts of a layer; groups of one size and no name may be one."""
    step = [*[(AR, ACTIVATION)] * 48, *[(AR, BUCKET)] * 5, (AR, 66 << 20), (AR, 4)]
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "dur": 5.0}
    events = [
        {
            **kernel,
            "ts": 10.0 * place,
            "args": {
                "Collective name": "allreduce",
                "Group size": 4 if n_bytes <= ACTIVATION else n_replicas,
                "In msg nelems": n_bytes,
                "dtype": "Byte",
            },
        }
        for place, (_, n_bytes) in enumerate(step * 4)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": events}))
    fingerprint = StageFingerprint()
    for block in read_trace(path).blocks():
        fingerprint.add_records(block)
    assert (fingerprint.stage, fingerprint.shown.tensor_parallel) == (Stage.ddp, wanted)
