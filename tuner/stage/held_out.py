"""Trains without one framework, or one family of models, and looks at just that one; offline, with torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.stage.dataset import Sequence
from tuner.stage.encoders import Encoder
from tuner.stage.evaluation import Tally, recognised
from tuner.stage.training import Examples, examples, train_lstm, train_ngram

FRAMEWORKS: Final = ("ddp", "zero_redundancy", "fsdp1", "fsdp2", "deepspeed", "ours", "none")
WORKLOADS: Final = ("other_inference", "other_gathers", "other_server", "other_checkpoint")
FAMILIES: Final = (("gpt", "llama", "vit"), ("mlp",), ("conv", "unet"), ("moe",), ("t5",), ("parallel",))


@dataclass(frozen=True)
class Fold:
    """What was left out, and how each encoder did on it, on recorded and on generated sequences."""

    left_out: str
    recorded: Mapping[str, Tally]
    generated: Mapping[str, Tally]


def train_both(data: Examples, seed: int, n_epochs: int) -> dict[str, Encoder]:
    """Both encoders on the same examples."""
    return {"lstm": train_lstm(data, seed, n_epochs), "ngram": train_ngram(data)}


def by_framework(sequences: Many[Sequence], seed: int, n_epochs: int, names: Many[str] = FRAMEWORKS) -> Iterator[Fold]:
    """One fold per framework: all that it emits is left out, recorded and generated."""
    return _folds(sequences, [(name, [one.group == name for one in sequences]) for name in names], seed, n_epochs)


def by_family(sequences: Many[Sequence], seed: int, n_epochs: int) -> Iterator[Fold]:
    """One fold per group of model families."""
    parts = [("+".join(families), [one.family in families for one in sequences]) for families in FAMILIES]
    return _folds(sequences, parts, seed, n_epochs)


def _folds(sequences: Many[Sequence], parts: Many[tuple[str, list[bool]]], seed: int, n_epochs: int) -> Iterator[Fold]:
    data = examples(sequences, seed)
    for name, is_out in parts:
        encoders = train_both(data.take(~np.array(is_out)[data.owners]), seed, n_epochs)
        left_out = [one for one, out in zip(sequences, is_out, strict=True) if out]
        tallies = {
            origin: {
                kind: total(recognised(encoder, [one for one in left_out if one.origin == origin], seed + 2))
                for kind, encoder in encoders.items()
            }
            for origin in ("recorded", "generated")
        }
        yield Fold(name, tallies["recorded"], tallies["generated"])


def total(tallies: Mapping[str, Tally]) -> Tally:
    """All groups together."""
    result = Tally()
    for tally in tallies.values():
        result.n += tally.n
        result.n_right += tally.n_right
        result.n_stage += tally.n_stage
        result.mistakes += tally.mistakes
    return result
