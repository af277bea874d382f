"""Generated workloads that are no data-parallel training: the recogniser must call them unknown."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from benchmarks.fingerprint.corpus.timeline import AG, AR, BROADCAST, REDUCE, RS, Calls, play_rounds
from zerotune.tuner.fingerprint.steps.anatomy import Ints

OTHERS: Final = ("sweep", "one_size", "gathers", "broadcasts", "server", "random", "inference", "checkpoint", "scalars")
_KINDS: Final = (AG, RS, AR, BROADCAST, REDUCE)


def other(kind: str, rng: np.random.Generator, n_steps: int) -> tuple[tuple[Ints, Ints, Ints], list[int]]:
    """The calls of `n_steps` rounds; `kind` is one of OTHERS.

    Returns:
        (collective, message_bytes, start in us) of all calls, and the index of each round's first call.
    """
    calls = _round(kind, rng)
    redraw = partial(_round, kind, rng) if kind == "random" else None
    return play_rounds(calls, n_steps, rng, redraw)


def _round(kind: str, rng: np.random.Generator) -> Calls:
    unit = 1 << int(rng.integers(12, 28))
    n = int(rng.integers(3, 80))
    if kind == "sweep":  # nccl-tests: sizes that double, several times each
        collective = _KINDS[int(rng.integers(0, 4))]
        return [(collective, 8 << i) for i in range(int(rng.integers(6, 25))) for _ in range(int(rng.integers(1, 4)))]
    if kind == "one_size":  # one call over and over: no step to be seen
        return [(_KINDS[int(rng.integers(0, 4))], unit)]
    if kind == "gathers":  # evaluation of a sharded model, or gathering features: nothing is reduced
        return [(AG, unit * int(rng.integers(1, 4))) for _ in range(n)]
    if kind == "broadcasts":
        return [(BROADCAST, int(rng.integers(1, 9)) * unit) for _ in range(n)]
    if kind == "server":  # reduce to a root, broadcast back
        sizes = [int(rng.integers(1, 9)) * unit for _ in range(n)]
        return [(REDUCE, s) for s in sizes] + [(BROADCAST, s) for s in sizes]
    if kind == "random":
        return [(_KINDS[int(rng.integers(0, 5))], int(rng.integers(1, 1 << 26))) for _ in range(n)]
    if kind == "inference":  # activations are summed, logits gathered, no gradient ever
        logits = int(rng.integers(2, 40)) * unit
        return [(AR, unit)] * (2 * n) + [(AG, logits)]
    if kind == "checkpoint":  # shards to everybody, counters
        return [(AG, int(rng.integers(1, 9)) * unit) for _ in range(n)] + [(BROADCAST, 64)] * 3
    return [(AR, int(rng.choice([4, 8, 64, 256]))) for _ in range(int(rng.integers(1, 6)))]  # scalars
