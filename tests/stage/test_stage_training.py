"""Generated sequences are what they claim, and training makes encoders that recognise what they never saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fingerprint.corpus.dataset import Sequence, generated, hypothetical, recorded
from zerotune.store.errors import UserError


@pytest.fixture(scope="module")
def sequences() -> list[Sequence]:
    return list(generated(6, 5))


def test_what_is_left_out_is_not_learned(sequences: list[Sequence], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the framework's sequences nor the family's, in any fold; hypothetical ones always are."""
    pytest.importorskip("torch")
    from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder, encoder_from_bytes
    from zerotune.tuner.fingerprint.encoding.weights import shipped_blob
    from zerotune.tuner.fingerprint.training import held_out
    from zerotune.tuner.fingerprint.training.train import Examples

    groups: dict[int, tuple[str, str]] = {}
    learned: list[set[int]] = []

    def of_one_part(ones: list[Sequence], seed: int) -> Examples:
        (part,) = {(one.group, one.family) for one in ones}
        groups[len(groups)] = part
        return rows(len(groups) - 1)

    def rows(number: int) -> Examples:
        return Examples(
            np.zeros((3, 1, 1), np.float32), np.ones(3, np.int64), np.zeros((3, 1)), np.full((3, 4), number)
        )

    def noting(data: Examples, seed: int, n_epochs: int, start: LstmEncoder, rate: float) -> LstmEncoder:
        learned.append(set(data.labels[:, 0].tolist()))
        return start

    start = encoder_from_bytes(shipped_blob("lstm"))
    assert isinstance(start, LstmEncoder)
    monkeypatch.setattr(held_out, "train_lstm", noting)
    monkeypatch.setattr(held_out, "examples", of_one_part)
    parts = held_out.parts_of(sequences, 0)
    assert len(parts) == len(groups) > 40
    for at, (key, names) in enumerate((("group", ("ddp", "ours")), ("family", ("gpt", "moe")))):
        learned.clear()
        assert [name for name, _ in held_out.one_left_out(parts, start, rows(-1), key, 0, names)] == [*names]
        for name, known in zip(names, learned, strict=True):
            assert known == {-1, *(number for number, part in groups.items() if part[at] != name)}


def test_what_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    from zerotune.tuner.offline.stage_command import train

    (tmp_path / "file").write_bytes(b"no database, and no folder" * 300)
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        train(tmp_path / "file", None, 10**9, 1, 1, 0)
    with pytest.raises(UserError, match="ZEROTUNE_STORE"):
        train(tmp_path / "out", tmp_path / "file", 10**9, 1, 1, 0)


@pytest.mark.slow
def test_the_training_command_makes_weights_that_load(tmp_path: Path) -> None:
    from zerotune.tuner.offline.stage_command import train, weights_known

    written = train(tmp_path / "weights", tmp_path / "store.db", 50, 2, 1, 0)
    assert [kind for kind, _, _ in written] == ["lstm", "ngram"]
    rows = weights_known(tmp_path / "store.db")
    assert [(row.encoder, row.state) for row in rows[:2]] == [("lstm", "good"), ("ngram", "good")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_frameworks_never_seen_are_recognised() -> None:
    """All of them at once: the encoder learned hypothetical runs only, and fewer than the shipped one."""
    from benchmarks.fingerprint.evaluation import recognised
    from zerotune.tuner.fingerprint.training.held_out import total
    from zerotune.tuner.fingerprint.training.train import examples, train_lstm

    encoder = train_lstm(examples(hypothetical(10_000, 3), 3), 0)
    accuracy = total(recognised(encoder, recorded(), 1))
    assert accuracy.stage_percent >= 96.0, accuracy.mistakes[:5]
    assert accuracy.percent >= 94.0, accuracy.mistakes[:5]
