"""What users share: others speak where this user measured nothing, and what they wrote is trusted in nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.store.records import (
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
)
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.knowledge_pool import MAX_FILE_BYTES, VERSION, KnowledgePool, Shared, checked

ME, ALICE, BOB = 1000, 1001, 1002
KEY, OTHER_KEY = (
    DecisionKey(CommunicatorClass(8, 1), Collective.all_gather, Phase.forward_gather, size) for size in (80, 84)
)
FAST = Candidate(Algorithm.tree, Protocol.ll, 4)
SLOW = Candidate(Algorithm.ring, Protocol.simple, 8)
SHAPES = (
    st.builds(Candidate, n_channels=st.integers(0, 64))
    | st.builds(Candidate, st.sampled_from(Algorithm), st.none() | st.sampled_from(Protocol), st.integers(0, 64))
)
"""Whatever a file can say that ran: halves, too."""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="writes as several users")


def line(candidate: Candidate, median_us: float, *, key: DecisionKey = KEY, count: int = 100) -> CandidateStatistics:
    is_default = candidate is SLOW
    return CandidateStatistics(key, candidate, is_default, count, median_us, median_us, 1.0, median_us, 1e9)


def lines(fast_us: float, *, key: DecisionKey = KEY, count: int = 100) -> list[CandidateStatistics]:
    return [line(SLOW, 100.0, key=key, count=count), line(FAST, fast_us, key=key, count=count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for uid in (ME, ALICE, BOB):
        (tmp_path / str(uid)).mkdir()
    return tmp_path


def tell(folder: Path, uid: int, statistics: list[CandidateStatistics], monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a user's daemon shares; returns the file."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: uid)
        KnowledgePool(folder).publish("fabric", statistics, [statistics])
    (written,) = (folder / str(uid)).iterdir()
    os.chown(written, uid, uid)
    return written


def known(folder: Path, own: list[CandidateStatistics], monkeypatch: pytest.MonkeyPatch) -> Knowledge:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: ME)
        statistics, by_job = KnowledgePool(folder).with_others("fabric", own, [own] if own else [])
    return Knowledge(statistics, by_job=by_job)


@as_root
def test_a_job_starts_with_what_others_proved(folder, monkeypatch):
    tell(folder, ALICE, lines(50.0), monkeypatch)
    assert known(folder, [], monkeypatch).decided(KEY)[0] == FAST
    assert known(folder, [], monkeypatch).decided(OTHER_KEY) is None


@as_root
def test_own_evidence_wins_where_there_is_any(folder, monkeypatch):
    tell(folder, ALICE, [*lines(50.0, count=10**6), *lines(60.0, key=OTHER_KEY)], monkeypatch)
    mine = known(folder, lines(150.0, count=10), monkeypatch)
    assert mine.decided(KEY) is None
    assert mine.promising(KEY) is None
    assert mine.decided(OTHER_KEY)[0] == FAST


@as_root
def test_at_each_key_who_measured_most_speaks_alone(folder, monkeypatch):
    """Their clocks and neighbours differ: one's baseline is no measure of the other's candidate."""
    tell(folder, ALICE, lines(120.0, count=500), monkeypatch)
    tell(folder, BOB, [line(FAST, 1.0, count=300)], monkeypatch)
    assert known(folder, [], monkeypatch).decided(KEY) is None


@as_root
def test_files_of_wrong_owner_or_size_are_left_out(folder, monkeypatch):
    path = tell(folder, ALICE, lines(50.0), monkeypatch)
    good = path.read_bytes()
    of_bob = folder / str(BOB) / path.name

    def decided() -> bool:
        return known(folder, [], monkeypatch).decided(KEY) is not None

    assert decided()
    os.chown(path, BOB, BOB)
    assert not decided(), "another's file in Alice's folder"
    path.unlink()
    of_bob.write_bytes(good)
    os.chown(of_bob, BOB, BOB)
    path.symlink_to(of_bob)
    assert decided(), "Bob's own"
    of_bob.unlink()
    of_bob.symlink_to(folder / "elsewhere")
    (folder / "elsewhere").write_bytes(good)
    os.chown(folder / "elsewhere", BOB, BOB)
    assert not decided(), "no link is followed"
    of_bob.unlink()
    os.mkfifo(of_bob)
    os.chown(of_bob, BOB, BOB)
    assert not decided(), "and no pipe waited for"
    of_bob.unlink()
    with of_bob.open("wb") as huge:
        huge.truncate(MAX_FILE_BYTES + 1)
    os.chown(of_bob, BOB, BOB)
    assert not decided()


@as_root
@pytest.mark.parametrize(
    "change",
    [
        {"median_us": 0.0},
        {"median_us": float("nan")},
        {"min_us": float("inf")},
        {"median_us": 1e-300},
        {"count": 10**12},
        {"count": 1e30},
        {"count": 0},
        {"std_us": -1.0},
        {"level_std": float("nan")},
        {"last_seen_s": float("nan")},
    ],
    ids=str,
)
def test_numbers_that_cannot_be(folder, monkeypatch, change):
    path = tell(folder, ALICE, lines(50.0), monkeypatch)
    told = msgspec.msgpack.decode(path.read_bytes())
    told["statistics"][1] |= change
    path.write_bytes(msgspec.msgpack.encode(told))
    assert known(folder, [], monkeypatch).decided(KEY) is None


@as_root
@pytest.mark.parametrize("size_class", [-1, 256, 10**6, 2**62])
def test_sizes_that_cannot_be(folder, monkeypatch, size_class):
    path = tell(folder, ALICE, lines(50.0), monkeypatch)
    told = msgspec.msgpack.decode(path.read_bytes())
    its = told["statistics"][1]
    told["statistics"].append(its | {"key": its["key"] | {"size_class": size_class}})
    path.write_bytes(msgspec.msgpack.encode(told))
    assert known(folder, [], monkeypatch).decided(KEY) is None


@given(st.lists(SHAPES, max_size=8), st.booleans())
def test_every_believed_statistic_can_be_learned_from(shapes, is_faster):
    """Parts of it may be unknown: such a setting is neither compared with those on offer nor proposed."""
    told = [line(SLOW, 100.0), *(line(shape, 50.0 if is_faster else 150.0) for shape in {*shapes} - {SLOW})]
    believed = checked("fabric", msgspec.msgpack.encode(Shared(VERSION, "fabric", told, [told])))
    shared = msgspec.msgpack.decode(believed, type=Shared)
    knowledge = Knowledge(shared.statistics, by_job=shared.by_job)
    offered = [Candidate(Algorithm.ring, protocol, n) for protocol in Protocol for n in (1, 2, 4, 8, 32)]
    mean, std = np.zeros(len(offered)), np.full(len(offered), 9.0)
    knowledge.apply_measurements(KEY, offered, mean, std)
    assert np.isfinite(mean).all()
    decided = knowledge.decided(KEY)
    assert decided is None or decided[0].protocol is not None
    assert is_faster or decided is None


@pytest.mark.slow
@as_root
@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_bytes_of_any_kind_raise_nothing(tmp_path_factory, damage, at):
    folder = tmp_path_factory.mktemp("pool")
    (folder / str(ALICE)).mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        path = tell(folder, ALICE, lines(50.0), monkeypatch)
        good = path.read_bytes()
        at %= len(good)
        path.write_bytes(good[:at] + damage + good[at + len(damage) :])
        known(folder, [], monkeypatch)


@as_root
def test_shared_knowledge_names_no_job_and_no_time(folder, monkeypatch):
    path = tell(folder, ALICE, lines(50.0), monkeypatch)
    told = msgspec.msgpack.decode(path.read_bytes())
    assert set(told) == {"version", "fabric_id", "statistics", "by_job"}
    assert {entry["last_seen_s"] for entry in told["statistics"]} == {0.0}
    assert path.stat().st_mode & 0o777 == 0o644
