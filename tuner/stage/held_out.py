"""Trains on hypothetical runs alone, or without one framework, and looks at what was left out; offline, with torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain
from typing import Final

from tuner.stage.dataset import Sequence, hypothetical
from tuner.stage.encoders import Encoder
from tuner.stage.evaluation import Tally, recognised
from tuner.stage.training import Examples, examples, train_lstm, train_ngram

FRAMEWORKS: Final = ("ddp", "zero_redundancy", "fsdp1", "fsdp2", "deepspeed", "ours", "megatron", "horovod", "none")
N_HYPOTHETICAL: Final = 40_000


@dataclass(frozen=True)
class Fold:
    """What was left out, and how each encoder did on it, on recorded and on generated sequences."""

    left_out: str
    recorded: Mapping[str, Tally]
    generated: Mapping[str, Tally]


def train_both(data: Examples, seed: int, n_epochs: int) -> dict[str, Encoder]:
    """Both encoders on the same examples."""
    return {"lstm": train_lstm(data, seed, n_epochs), "ngram": train_ngram(data)}


def on_hypothetical(n: int, seed: int, n_epochs: int) -> dict[str, Encoder]:
    """Both encoders, trained without any framework, family of models or workload that has a name."""
    return train_both(examples(hypothetical(n, seed), seed), seed, n_epochs)


def by_framework(
    sequences: Many[Sequence], seed: int, n_epochs: int, names: Iterable[str], n_hypothetical: int
) -> Iterator[Fold]:
    """One fold per framework: all that it emits is left out, recorded and generated; the others are learned."""
    for name in names:
        rest = (one for one in sequences if one.group != name)
        encoders = train_both(examples(chain(hypothetical(n_hypothetical, seed), rest), seed), seed, n_epochs)
        yield looked_at(encoders, name, [one for one in sequences if one.group == name], seed)


def looked_at(encoders: Mapping[str, Encoder], name: str, sequences: Many[Sequence], seed: int) -> Fold:
    """How encoders that did not learn these sequences do on them."""
    tallies = {
        origin: {
            kind: total(recognised(encoder, [one for one in sequences if one.origin == origin], seed + 2))
            for kind, encoder in encoders.items()
        }
        for origin in ("recorded", "generated")
    }
    return Fold(name, tallies["recorded"], tallies["generated"])


def total(tallies: Mapping[str, Tally]) -> Tally:
    """All groups together."""
    result = Tally()
    for tally in tallies.values():
        result.n += tally.n
        result.n_right += tally.n_right
        result.n_stage += tally.n_stage
        result.mistakes += tally.mistakes
    return result
