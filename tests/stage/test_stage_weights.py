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
from typer.testing import CliRunner

from zerotune.tuner.fingerprint.encoding import arrays
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder
from zerotune.tuner.fingerprint.encoding.features import FEATURES_VERSION
from zerotune.tuner.fingerprint.encoding.weights import SHIPPED
from zerotune.tuner.fingerprint.labels import N_OUTPUTS
from zerotune.tuner.fingerprint.steps.anatomy import Step, encode

BLOB = SHIPPED.read_bytes()
STEP = Step(encode(np.array([2, 2, 3, 4]), np.array([1 << 20, 1 << 21, 1 << 20, 4])), np.zeros(4))


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


def test_the_command_names_weights_and_reads_a_trace() -> None:
    from zerotune.tuner.cli.offline.stage import stage

    shown = CliRunner().invoke(stage, ["show"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("good") == 1
    trace = Path(__file__).parent.parent / "data" / "kineto" / "resnet_2gpu_rank0_reduced.json.gz"
    tested = CliRunner().invoke(stage, ["test", str(trace)], env={"COLUMNS": "160"})
    assert tested.exit_code == 0, tested.output
    assert re.search(r"\b7 .*: ddp", tested.output)
