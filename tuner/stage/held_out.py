"""Trains without one framework, or one family of models, and looks at just that one; offline, with torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

from tuner.stage.dataset import Sequence
from tuner.stage.encoders import Encoder
from tuner.stage.evaluation import Tally, recognised
from tuner.stage.training import examples, train_lstm, train_ngram

FRAMEWORKS: Final = ("ddp", "zero_redundancy", "fsdp1", "fsdp2", "deepspeed", "ours", "none")
FAMILIES: Final = (("gpt", "llama", "vit"), ("mlp",), ("conv", "unet"), ("moe",), ("t5",), ("parallel",))
GENERATED_VIEWS: Final = 4
RECORDED_VIEWS: Final = 12


@dataclass(frozen=True)
class Fold:
    """What was left out, and how each encoder did on it, on recorded and on generated sequences."""

    left_out: str
    recorded: Mapping[str, Tally]
    generated: Mapping[str, Tally]


def train_both(recorded: Many[Sequence], generated: Many[Sequence], seed: int, n_epochs: int) -> dict[str, Encoder]:
    """Both encoders on the same examples."""
    data = examples(recorded, RECORDED_VIEWS, seed) + examples(generated, GENERATED_VIEWS, seed + 1)
    return {"lstm": train_lstm(data, seed, n_epochs), "ngram": train_ngram(data)}


def by_framework(
    recorded: Many[Sequence], generated: Many[Sequence], seed: int, n_epochs: int, names: Many[str] = FRAMEWORKS
) -> Iterator[Fold]:
    """One fold per framework: all that it emits is left out, recorded and generated."""
    for name in names:
        yield _fold(name, {name}, set(), recorded, generated, seed, n_epochs)


def by_family(recorded: Many[Sequence], generated: Many[Sequence], seed: int, n_epochs: int) -> Iterator[Fold]:
    """One fold per group of model families."""
    for families in FAMILIES:
        yield _fold("+".join(families), set(), set(families), recorded, generated, seed, n_epochs)


def _fold(
    name: str, groups: set[str], families: set[str], recorded: Many[Sequence], generated: Many[Sequence],
    seed: int, n_epochs: int,
) -> Fold:  # fmt: skip
    def is_out(sequence: Sequence) -> bool:
        return sequence.group in groups or sequence.family in families

    encoders = train_both(
        [one for one in recorded if not is_out(one)], [one for one in generated if not is_out(one)], seed, n_epochs
    )

    def tally(sequences: Many[Sequence]) -> dict[str, Tally]:
        left_out = [one for one in sequences if is_out(one)]
        return {kind: total(recognised(encoder, left_out, seed + 2)) for kind, encoder in encoders.items()}

    return Fold(name, tally(recorded), tally(generated))


def total(tallies: Mapping[str, Tally]) -> Tally:
    """All groups together."""
    result = Tally()
    for tally in tallies.values():
        result.n += tally.n
        result.n_right += tally.n_right
        result.n_stage += tally.n_stage
        result.mistakes += tally.mistakes
    return result
