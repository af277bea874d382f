"""Random collectives of workloads that are no data-parallel training.

Each kind lacks something that every kind of training needs: a reduction, the return of the reduced data, volumes that
belong together, or a step that repeats.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from benchmarks.fingerprint.corpus.timeline import AG, AR, BROADCAST, REDUCE, RS, Calls, play_rounds
from zerotune.store.records import Collective
from zerotune.tuner.fingerprint.steps.anatomy import Ints

KINDS: Final = ("unreduced", "sizes", "to_one", "activations", "unbalanced", "mixed", "never_again")
_ALL: Final = (AG, RS, AR, BROADCAST, REDUCE)


def play(kind: str, n_steps: int, rng: np.random.Generator) -> tuple[tuple[Ints, Ints, Ints], list[int]]:
    """The calls of `n_steps` rounds; `kind` is one of KINDS.

    Returns:
        (collective, message_bytes, start in us) of all calls, and the index of each round's first call.
    """
    calls = _round(kind, rng)
    redraw = partial(_round, kind, rng) if kind == "never_again" else None
    return play_rounds(calls, n_steps, rng, redraw)


def _round(kind: str, rng: np.random.Generator) -> Calls:
    n = int(np.exp(rng.uniform(np.log(2), np.log(100))))
    if kind == "unreduced":
        few = _sizes(int(rng.integers(1, 8)), rng)
        mainly = [AG, BROADCAST][int(rng.integers(2))]
        other = [AG, BROADCAST][int(rng.integers(2))]
        calls: Calls = [(mainly if rng.random() < 0.8 else other, int(rng.choice(few))) for _ in range(n)]
        return _sprinkled(calls, rng)
    if kind == "sizes":  # one collective tried at sizes that grow
        collective, growth = Collective(rng.choice(_ALL)), float(rng.choice([1.25, 1.5, 2.0, 2.0, 4.0]))
        sizes = [max(1, int(8 * growth**i)) for i in range(int(rng.integers(6, 30)))]
        n_each = int(rng.integers(1, 5))
        return [(collective, min(n_bytes, 1 << 33)) for n_bytes in sizes for _ in range(n_each)]
    if kind == "to_one":  # a root collects, and may tell everybody
        sizes = _sizes(n, rng)
        back: Calls = [(BROADCAST, n_bytes) for n_bytes in (sizes if rng.random() < 0.7 else _sizes(n, rng))]
        returned = back if rng.random() < 0.7 else []
        if rng.random() < 0.3 and returned:
            return _sprinkled(
                [call for pair in zip([(REDUCE, s) for s in sizes], returned, strict=True) for call in pair], rng
            )
        return _sprinkled([(REDUCE, n_bytes) for n_bytes in sizes] + returned, rng)
    if kind == "activations":  # a model answers: summed or gathered in every layer, nothing is learned
        (unit,) = _sizes(1, rng)
        per_layer: Calls = [(AR, unit)] if rng.random() < 0.6 else [(AG, unit), (RS, unit)]
        per_layer = per_layer * int(rng.choice([1, 2, 2, 3]))
        result = int(unit * np.exp(rng.uniform(np.log(1.5), np.log(100))))
        return per_layer * max(2, n // 2) + [(AG, result)] * int(rng.choice([1, 1, 2]))
    if kind == "unbalanced":  # reductions and gathers that have nothing to do with one another
        sends, gathers = _sizes(int(rng.integers(1, 12)), rng), _sizes(int(rng.integers(1, 12)), rng)
        ratio = float(np.exp(rng.choice([-1, 1]) * rng.uniform(np.log(40), np.log(2000))))
        scale = ratio * sum(sends) / sum(gathers)
        sent: Calls = [(Collective(rng.choice([AR, RS])), n_bytes) for n_bytes in sends]
        return _sprinkled(sent + [(AG, max(2049, int(scale * n_bytes))) for n_bytes in gathers], rng)
    shares = rng.dirichlet(np.full(5, 2.0))
    while kind == "mixed" and shares.min() < 0.08:
        shares = rng.dirichlet(np.full(5, 2.0))
    sizes = _sizes(max(n, 8), rng) if rng.random() < 0.5 else rng.choice(_sizes(4, rng), max(n, 8)).tolist()
    return [(_ALL[int(rng.choice(5, p=shares))], n_bytes) for n_bytes in sizes]


def _sizes(n: int, rng: np.random.Generator) -> list[int]:
    unit = float(np.exp(rng.uniform(np.log(5e3), np.log(1e8))))
    spread = float(rng.choice([0.0, 0.3, 1.5]))
    return [max(2049, int(unit * np.exp(spread * rng.standard_normal()))) for _ in range(n)]


def _sprinkled(calls: Calls, rng: np.random.Generator) -> Calls:
    calls = list(calls)
    for _ in range(int(rng.choice([0, 0, 1, 2, 4]))):
        small = (Collective(rng.choice([AR, BROADCAST, AG])), int(rng.choice([1, 4, 8, 64, 1024])))
        calls.insert(int(rng.integers(0, len(calls) + 1)), small)
    return calls
