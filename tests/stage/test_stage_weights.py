"""Weights at rest: plain arrays, checked; without readable ones no stage is recognised."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib.command_line import zerotune
from zerotune.store.records import Stage
from zerotune.tuner.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.encoding import arrays, weights
from zerotune.tuner.fingerprint.encoding.encoders import MAX_DEVIATION, LstmEncoder
from zerotune.tuner.fingerprint.encoding.features import FEATURES_VERSION
from zerotune.tuner.fingerprint.encoding.weights import SHIPPED
from zerotune.tuner.fingerprint.labels import N_OUTPUTS
from zerotune.tuner.fingerprint.steps.anatomy import Step, encode

BLOB = SHIPPED.read_bytes()
STEP = Step(encode(np.array([2, 2, 3, 4]), np.array([1 << 20, 1 << 21, 1 << 20, 4])), np.zeros(4))


def test_shipped_weights_are_small_and_survive_a_round_trip() -> None:
    encoder = LstmEncoder.from_bytes(BLOB)
    assert len(BLOB) < arrays.MAX_BLOB_BYTES
    assert encoder.to_bytes() == BLOB
    assert np.isfinite(encoder.scores(STEP)).all()


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x80\x04",
        pickle.dumps({"arrays": 1}),
        b"\x00" * (arrays.MAX_BLOB_BYTES + 1),
        BLOB[:-9],
        arrays.to_bytes("lstm", FEATURES_VERSION, {}),
        arrays.to_bytes("lstm", FEATURES_VERSION + 1, {}),
        arrays.to_bytes("other", FEATURES_VERSION, {"mean": np.zeros(3)}),
        arrays.to_bytes("lstm", FEATURES_VERSION, {"mean": np.array([np.nan])}),
        arrays.to_bytes("lstm", FEATURES_VERSION, {"recurrent": np.zeros((4, 1)), "input": np.zeros((9, 9))}),
        msgspec.msgpack.encode({"format": "zerotune-stage-weights", "version": 1, "kind": "lstm", "features": 1,
                                "arrays": {"input": {"shape": [-1, 4], "values": b""}}}),
    ],
)  # fmt: skip
def test_foreign_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        LstmEncoder.from_bytes(blob)


@settings(max_examples=60)
@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    blob = bytearray(BLOB)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        encoder = LstmEncoder.from_bytes(bytes(blob))
    except ValueError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a flipped exponent may overflow; it must not raise
        assert encoder.scores(STEP).shape == (N_OUTPUTS,)


def test_damaged_weights_recognise_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHIPPED", tmp_path / "lstm.weights")
    for blob in (None, b"not weights"):
        if blob is not None:
            (tmp_path / "lstm.weights").write_bytes(blob)
        weights.default_encoder.cache_clear()
        try:
            fingerprint = StageFingerprint()
        finally:
            weights.default_encoder.cache_clear()
        kinds, n_bytes = np.tile([2, 2, 3], 9), np.tile([1 << 20, 1 << 21, 1 << 20], 9)
        fingerprint.add(kinds, n_bytes, np.zeros(27))
        assert (fingerprint.calls_per_step, fingerprint.stage) == (3, Stage.unknown)


def test_numpy_computes_what_torch_does() -> None:
    torch = pytest.importorskip("torch")
    from zerotune.tuner.fingerprint.encoding.features import N_FRAME, frames, summary

    encoder = LstmEncoder.from_bytes(BLOB)
    _, values = arrays.from_bytes(BLOB, FEATURES_VERSION)
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    n = tensors["recurrent"].shape[1]
    lstm = torch.nn.LSTM(N_FRAME, n, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(tensors["input"])
        lstm.weight_hh_l0.copy_(tensors["recurrent"])
        lstm.bias_ih_l0.copy_(tensors["bias"])
        lstm.bias_hh_l0.zero_()
        _, (state, _) = lstm(torch.tensor(frames(STEP))[None])
        known = ((torch.tensor(summary(STEP)) - tensors["mean"]) * tensors["scale"]).clamp(
            -MAX_DEVIATION, MAX_DEVIATION
        )
        hidden = torch.tanh(tensors["hidden"] @ torch.cat([state[0, 0], known]) + tensors["hidden_bias"])
        expected = tensors["output"] @ hidden + tensors["output_bias"]
    np.testing.assert_allclose(encoder.scores(STEP), expected.numpy(), rtol=1e-9, atol=1e-9)


def test_the_command_reads_a_trace() -> None:
    trace = Path(__file__).parent.parent / "data" / "kineto" / "resnet_2gpu_rank0_reduced.json.gz"
    shown = zerotune("explain", "--trace", trace)
    assert shown.code == 0, shown.err
    assert re.search(r"\b7 .*: ddp", shown.out)
