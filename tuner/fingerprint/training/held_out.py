"""Trains on hypothetical runs alone, or on all but one framework or family, and looks at what was left out; offline.

Two protocols. In the harder one, an encoder learns hypothetical runs only, so all that has a name is left out at once.
In the other, it goes on to learn what has a name but for one framework, or one family of models: nothing of that one,
recorded or generated, is among what it learns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final, NamedTuple

from zerotune.tuner.fingerprint.corpus.dataset import Sequence, hypothetical
from zerotune.tuner.fingerprint.encoding.encoders import Encoder, LstmEncoder
from zerotune.tuner.fingerprint.training.evaluation import Accuracy, changes_noticed, recognised
from zerotune.tuner.fingerprint.training.train import Examples, examples, train_lstm, train_ngram

FRAMEWORKS: Final = ("ddp", "zero_redundancy", "fsdp1", "fsdp2", "deepspeed", "ours", "megatron", "horovod", "none")
N_HYPOTHETICAL: Final = 60_000
N_MORE_EPOCHS: Final = 4
MORE_RATE: Final = 1.5e-3
"""Training on named frameworks goes on from weights that learned hypothetical runs: shorter, and at a lower rate."""
N_KEPT: Final = 12_000
"""Hypothetical examples among what is learned then."""
N_CHANGES: Final = 100
"""Per fold: from any run to one of those left out."""


@dataclass(frozen=True)
class Fold:
    """What was left out, and how each encoder did on it, on recorded and on generated sequences."""

    left_out: str
    recorded: Mapping[str, Accuracy]
    generated: Mapping[str, Accuracy]
    changes: Mapping[str, Accuracy]


class FrameworkFamily(NamedTuple):
    """All runs of one framework on models of one family."""

    group: str
    family: str


def train_both(data: Examples, seed: int, n_epochs: int) -> dict[str, Encoder]:
    """Train both encoders on the same examples.

    Args:
        data: the examples.
        seed: of the LSTM's training.
        n_epochs: of the LSTM's training.

    Returns:
        Encoders by kind: `lstm`, `ngram`.
    """
    return {"lstm": train_lstm(data, seed, n_epochs), "ngram": train_ngram(data)}


def on_hypothetical(n: int, seed: int) -> Examples:
    """What an encoder learns without any framework, family of models or workload that has a name."""
    return examples(hypothetical(n, seed), seed)


def parts_of(sequences: Iterable[Sequence], seed: int) -> dict[FrameworkFamily, Examples]:
    """Examples of all sequences that have a name, in parts that can be left out."""
    ones: dict[FrameworkFamily, list[Sequence]] = defaultdict(list)
    for one in sequences:
        ones[FrameworkFamily(one.group, one.family)].append(one)
    return {part: examples(some, seed) for part, some in ones.items()}


def one_left_out(
    parts: Mapping[FrameworkFamily, Examples],
    start: LstmEncoder,
    learned: Examples,
    key: str,
    seed: int,
    names: Iterable[str],
) -> Iterator[tuple[str, LstmEncoder]]:
    """Leave out one framework, or one family of models, after the other, and learn all the rest.

    Args:
        parts: examples by framework and family.
        start: weights from hypothetical runs, from which each training goes on.
        learned: the hypothetical examples; some of them are learned again.
        key: what is left out: `group` (framework) or `family`.
        seed: of training.
        names: of what is left out, one at a time.

    Yields:
        The name and an encoder that never learned anything of it.
    """
    kept = learned.some(N_KEPT, seed)
    for name in names:
        others = [some for part, some in parts.items() if getattr(part, key) != name]
        yield name, train_lstm(Examples.joined([kept, *others]), seed, N_MORE_EPOCHS, start, MORE_RATE)


def looked_at(
    encoders: Mapping[str, Encoder], name: str, ones: Many[Sequence], seed: int, before: Many[Sequence] = ()
) -> Fold:
    """How good encoders are on sequences that they did not learn.

    Args:
        encoders: by kind.
        name: of what was left out.
        ones: the sequences that were left out.
        seed: of the random generator.
        before: changes from any of these to `ones` are judged as well; none: no changes.

    Returns:
        Accuracies by kind of encoder.
    """
    accuracies = {
        origin: {
            kind: total(recognised(encoder, [one for one in ones if one.origin == origin], seed + 2))
            for kind, encoder in encoders.items()
        }
        for origin in ("recorded", "generated")
    }
    changes = {
        kind: changes_noticed(encoder, before, N_CHANGES, seed + 3, ones)
        for kind, encoder in encoders.items()
        if before
    }
    return Fold(name, accuracies["recorded"], accuracies["generated"], changes)


def total(accuracies: Mapping[str, Accuracy]) -> Accuracy:
    """All groups together."""
    result = Accuracy()
    for accuracy in accuracies.values():
        result.n += accuracy.n
        result.n_right += accuracy.n_right
        result.n_stage += accuracy.n_stage
        result.mistakes += accuracy.mistakes
    return result
