"""Training makes weights that load, and that recognise what they never saw."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.fingerprint.corpus.dataset import hypothetical, recorded
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder


@pytest.mark.slow
def test_the_training_script_makes_weights_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "lstm.weights"
    words = ["stage_train", "--out", str(out), "--hypothetical-only", "--n-hypothetical", "50", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_module("benchmarks.fingerprint.stage_train", run_name="__main__")
    assert LstmEncoder.from_bytes(out.read_bytes()).to_bytes() == out.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_frameworks_never_seen_are_recognised() -> None:
    """All of them at once: the encoder learned hypothetical runs only, and fewer than the shipped one."""
    pytest.importorskip("torch")
    from benchmarks.fingerprint.evaluation import recognised
    from benchmarks.fingerprint.stage_train import examples, train_lstm

    encoder = train_lstm(examples(hypothetical(10_000, 3), 3), 0)
    accuracy = recognised(encoder, recorded(), 1)
    assert accuracy.stage_percent >= 96.0, accuracy.mistakes[:5]
    assert accuracy.percent >= 94.0, accuracy.mistakes[:5]
