"""The generator gathers what DeepSpeed was recorded to gather, call by call, for the same model and settings."""

from __future__ import annotations

import gzip
import json

import pytest

from zerotune.store.records import Collective
from zerotune.tuner.fingerprint.corpus.dataset import RECORDINGS, SETTLED_STEP
from zerotune.tuner.fingerprint.corpus.deepspeed import Gathering, gathers

torch = pytest.importorskip("torch")

ELEMENT_BYTES = 4
PERSISTENCE, ALL = 1000, 1 << 40
"""As benchmarks/fingerprint/stage_recordings.py sets them; by default everything stays in models so small."""


def test_gathers_are_those_recorded() -> None:
    from benchmarks.fingerprint.stage_models import MODELS

    with gzip.open(RECORDINGS, "rt") as lines:
        runs = [run for run in map(json.loads, lines) if run["framework"] == "deepspeed" and run["stage"] == "zero3"]
    assert len(runs) >= 48
    for run in runs:
        with torch.device("meta"):
            tensors = [one.numel() for one in MODELS[run["model"]]().parameters()]
        limits = (run.get("live", 0), run.get("reuse", 0)) if run.get("releases") else (ALL, ALL)
        forward = list(range(len(tensors)))
        how = Gathering(PERSISTENCE, int(run["bucket_mb"] * 2**18), *limits)
        expected = [n for calls in gathers(tensors, forward + forward[::-1], how) for n in calls] * run["n_micro"]
        expected += [n for n in tensors if n < PERSISTENCE]
        start, end = run["step_starts"][SETTLED_STEP : SETTLED_STEP + 2]
        gathered = [
            n_bytes // ELEMENT_BYTES
            for collective, n_bytes in zip(run["collective"][start:end], run["message_bytes"][start:end], strict=True)
            if collective == Collective.all_gather
        ]
        if run.get("live") and run["n_micro"] > 1:  # what one pass has looked ahead at changes the next a little
            assert sum(gathered) == pytest.approx(sum(expected), rel=0.05), run["model"]
            continue
        padding = run["n_ranks"] - 1
        assert len(gathered) == len(expected), run["model"]
        assert all(0 <= got - n <= padding for got, n in zip(gathered, expected, strict=True)), run["model"]
