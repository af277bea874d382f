"""The generator gathers what DeepSpeed was recorded to gather, call by call, for the same model and settings."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.corpus import generator
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


def test_a_run_that_gathers_next_to_nothing_twice_is_labelled_as_one_that_keeps() -> None:
    """Where little but the embedding is large, all of the blocks are kept for backward."""
    rng = np.random.default_rng(8504)
    stages = Counter[Stage]()
    for _ in range(400):
        run = generator.setup("deepspeed_3", rng, "moe")
        one = replace(run, training=msgspec.structs.replace(run.training, n_micro=1, tensor_parallel=False))
        (kinds, n_bytes, _), _ = generator.play(one, 1, rng)
        gathered = int(n_bytes[kinds == Collective.all_gather].sum())
        once = run.parameter_bytes * sum(map(sum, (run.model.first, *run.units, run.model.last)))
        stages[run.training.stage] += 1
        assert gathered >= once
        assert run.training.stage is Stage.zero3 or gathered < 1.1 * once
    assert 0 < stages[Stage.zero2] < stages[Stage.zero3]


ELEMENTS = st.lists(st.integers(1, 1000), min_size=1, max_size=20)


@given(ELEMENTS, st.integers(0, 500), st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_all_is_gathered_once_or_twice(tensors: list[int], small: int, ahead: int, live: int, reuse: int) -> None:
    forward = list(range(len(tensors)))
    total = sum(n for n in tensors if n >= small)
    passes = forward + forward[::-1]
    gathered = sum(map(sum, gathers(tensors, passes, Gathering(small, ahead, live, reuse))))
    assert total <= gathered <= 2 * total
    assert sum(map(sum, gathers(tensors, passes, Gathering(small, ahead, ALL, ALL)))) == total
    assert sum(map(sum, gathers(tensors, passes, Gathering(small, 0, 0, 0)))) == 2 * total
