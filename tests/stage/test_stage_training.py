"""Generated sequences are what they claim, and training makes encoders that recognise what they never saw."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.errors import UserError
from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.corpus import grammar, no_training
from zerotune.tuner.fingerprint.corpus.dataset import Sequence, disturbed, generated, hypothetical, one_step, recorded
from zerotune.tuner.fingerprint.corpus.generator import FRAMEWORKS
from zerotune.tuner.fingerprint.corpus.others import OTHERS


@pytest.fixture(scope="module")
def sequences() -> list[Sequence]:
    return list(generated(6, 5))


def test_the_same_seed_gives_the_same_sequences(sequences: list[Sequence]) -> None:
    for one, other in zip(sequences, generated(6, 5), strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one.codes(), other.codes())
        np.testing.assert_array_equal(one.start_us, other.start_us)


def test_every_framework_and_other_workload_is_generated(sequences: list[Sequence]) -> None:
    seen = {one.name.split()[0] for one in sequences}
    assert set(FRAMEWORKS) | set(OTHERS) <= seen
    assert {one.shown.stage for one in sequences} == set(Stage)
    assert all(one.origin == "generated" for one in sequences)


def test_generated_volumes_are_those_of_theory(sequences: list[Sequence]) -> None:
    """Parameters gathered per gradient sent, in bytes of each: 1 for ZeRO-1, 2 for ZeRO-3 and no root kept."""
    for one in sequences:
        step = one.step(1)
        kinds, n_bytes = one.collectives[step], one.message_bytes[step]
        volume = {kind: int(n_bytes[kinds == kind].sum()) for kind in Collective}
        if one.training.tensor_parallel or one.training.stage is Stage.unknown:
            continue
        sent = volume[Collective.reduce_scatter] + volume[Collective.all_reduce]
        gathered = volume[Collective.all_gather]
        n_sends = one.training.n_micro if one.training.sends_each else 1
        n_gathers = one.training.n_micro if one.training.gathers_each else 1
        if one.training.stage is Stage.ddp:
            assert gathered == 0
        elif gathered:
            # Elements of parameters and gradients have 2 or 4 bytes each.
            ratio = gathered / n_gathers / (sent / n_sends)
            assert 0.45 <= ratio <= (4.2 if one.training.stage is Stage.zero3 else 2.1), one.name


def test_the_same_seed_gives_the_same_hypothetical_runs() -> None:
    for one, other in zip(hypothetical(40, 5), hypothetical(40, 5), strict=True):
        assert (one.name, one.training) == (other.name, other.training)
        np.testing.assert_array_equal(one.codes(), other.codes())
        np.testing.assert_array_equal(one.start_us, other.start_us)


def test_hypothetical_runs_move_what_their_label_says() -> None:
    """Elements gathered per element sent, by micro-step: none, once after the step, once each, more than once each."""
    rng = np.random.default_rng(8)
    for _ in range(300):
        run = grammar.draw(rng)
        sent, forward, again = (sum(n for _, n in calls) for calls in (run.sends, run.forward, run.backward))
        stage = run.training.stage
        assert (sent > 0) == (stage is not Stage.unknown)
        assert (forward > 0) == (stage in (Stage.zero2, Stage.zero3))
        assert (again > 0) == (stage is Stage.zero3)
        if stage is Stage.zero1:
            assert 0.4 * sent < sum(run.updates) < 1.1 * sent + 256 * 128 * len(run.updates)
        if stage is Stage.ddp:
            assert not run.updates
        (kinds, _, starts_us), starts = grammar.play(run, 2, rng)
        assert len(kinds) % 2 == 0
        assert starts == [0, len(kinds) // 2]
        assert (np.diff(starts_us) >= 0).all()


def test_what_is_no_training_lacks_something() -> None:
    rng = np.random.default_rng(9)
    for kind in no_training.KINDS * 8:
        (kinds, n_bytes, _), starts = no_training.play(kind, 3, rng)
        assert len(starts) == 3
        large = set(kinds[n_bytes > 2048].tolist())
        if kind == "unreduced":
            assert not large & {Collective.all_reduce, Collective.reduce_scatter, Collective.reduce}
        if kind == "to_one":
            assert large <= {Collective.reduce, Collective.broadcast}


def test_starts_never_go_back(sequences: list[Sequence]) -> None:
    assert all((np.diff(one.start_us) >= 0).all() for one in sequences)


def test_disturbing_loses_and_exchanges_a_few(sequences: list[Sequence]) -> None:
    codes = np.arange(10_000)
    changed, gaps_us = disturbed(codes, np.ones(10_000), np.random.default_rng(0), 0.02)
    assert 9_800 < len(changed) == len(gaps_us) < 9_980
    assert 50 < np.count_nonzero(np.diff(changed) < 0) < 200


def test_one_step_is_the_primitive_period(sequences: list[Sequence]) -> None:
    for one in sequences[:60]:
        codes, gaps_us = one_step(one, np.random.default_rng(1), has_gaps=True, rate=0.0)
        step = one.codes()[one.step(2)]
        assert len(step) % len(codes) == 0
        assert len(gaps_us) == len(codes)
        if not one.group.startswith("other_random"):
            assert Counter(np.tile(codes, len(step) // len(codes)).tolist()) == Counter(step.tolist())


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
    from zerotune.tuner.fingerprint.training.evaluation import recognised
    from zerotune.tuner.fingerprint.training.held_out import total
    from zerotune.tuner.fingerprint.training.train import examples, train_lstm

    encoder = train_lstm(examples(hypothetical(10_000, 3), 3), 0)
    accuracy = total(recognised(encoder, recorded(), 1))
    assert accuracy.stage_percent >= 96.0, accuracy.mistakes[:5]
    assert accuracy.percent >= 94.0, accuracy.mistakes[:5]
