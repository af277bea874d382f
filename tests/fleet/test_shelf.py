"""What a daemon takes off the shelf: a book signed by the pinned key, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from benchmarks.lib.waiting import wait_until
from zerotune.store.records import Algorithm, Candidate, Protocol

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
from zerotune.tuner.fleet import shelf as shelf_module
from zerotune.tuner.fleet.book import Head, sealed
from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.objects import Fabric, pack
from zerotune.tuner.fleet.shelf import Shelf
from zerotune.tuner.fleet.signing import Signer, Verifier, make_key
from zerotune.tuner.fleet.storage import Storage

WAIT_S = 30


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Verifier, Verifier]:
    """A signed book, its key, and another's."""
    folder = tmp_path_factory.mktemp("book")
    for node in range(3):
        block = measured(40, seed=node)
        name, job = f"node{node}", np.zeros(len(block), np.int64)
        packed = pack(name, Fabric("fabric", FACTS), ["job"], job, block, 1_800_000_000, signer_of(name))
        Storage(str(folder / "fleet"), writes=True).put(*packed)
    ours, others = (Verifier.of(make_key(folder / name)) for name in ("key", "other"))
    build(str(folder / "fleet"), folder / "book", signer=Signer.from_file(folder / "key"))
    return folder / "book", ours, others


@pytest.fixture
def shelf_of() -> Iterator[Callable[[Path, Verifier], Shelf]]:
    shelves: list[Shelf] = []

    def start(path: Path, verifier: Verifier) -> Shelf:
        shelves.append(Shelf(str(path), verifier, read_every_s=0.01))
        return shelves[-1]

    yield start
    for shelf in shelves:
        shelf.close()


def test_the_shelf_tells_winners_of_this_fabric(made, shelf_of) -> None:
    shelf, news = shelf_of(made[0], made[1]), threading.Event()
    shelf.on_news = news.set
    assert shelf.recommended_on("fabric") == {}
    shelf.start()
    assert news.wait(WAIT_S)
    told = shelf.recommended_on("fabric")
    assert {candidate for candidate, _, _ in told.values()} == {Candidate(Algorithm.ring, Protocol.ll128, 8)}
    assert [gain for _, gain, _ in told.values()] == pytest.approx([0.1, 0.1], abs=0.01)
    assert shelf.n_winners == 2
    assert shelf.error == ""
    assert shelf.recommended_on("another") == {}


def test_a_question_during_the_reading_waits_for_the_book(made, shelf_of, monkeypatch) -> None:
    may_read, at_once = threading.Event(), shelf_module.read_book

    def read_later(url: str, verifier: Verifier | None) -> object:
        assert may_read.wait(WAIT_S)
        return at_once(url, verifier)

    monkeypatch.setattr(shelf_module, "read_book", read_later)
    shelf = shelf_of(made[0], made[1])
    shelf.start()
    threading.Timer(0.2, may_read.set).start()
    assert len(shelf.recommended_on("fabric")) == 2


@pytest.mark.parametrize("kind", ["other key", "unsigned", "cut", "missing"])
def test_a_book_that_is_not_believed_is_an_error_and_tells_nothing(made, shelf_of, kind, tmp_path) -> None:
    data, path = made[0].read_bytes(), tmp_path / "book"
    if kind != "missing":
        body = data.partition(b"\n")[2]
        path.write_bytes({"unsigned": b'{"zerotune_book":1}\n' + body, "cut": data[:-1]}.get(kind, data))
    shelf = shelf_of(path, made[2] if kind == "other key" else made[1])
    shelf.start()
    wait_until(lambda: bool(shelf.error))
    assert shelf.recommended_on("fabric") == {}


def test_a_bad_book_leaves_the_good_one_of_before(made, shelf_of, tmp_path) -> None:
    path = tmp_path / "book"
    path.write_bytes(made[0].read_bytes())
    shelf = shelf_of(path, made[1])
    shelf.start()
    wait_until(lambda: shelf.n_winners == 2)
    path.write_bytes(b"junk")
    wait_until(lambda: bool(shelf.error))
    assert len(shelf.recommended_on("fabric")) == 2


def test_an_older_book_takes_no_newer_ones_place(made, shelf_of, tmp_path) -> None:
    path, verifier, _ = made
    place = tmp_path / "book"
    older = path.read_bytes()
    build(str(path.parent / "fleet"), path, signer=Signer.from_file(path.parent / "key"))
    place.write_bytes(path.read_bytes())
    shelf = shelf_of(place, verifier)
    shelf.start()
    assert len(shelf.recommended_on("fabric")) == 2
    place.write_bytes(older)
    wait_until(lambda: shelf.error != "")
    assert shelf.n_winners == 2
    later = shelf_of(place, verifier)  # of a daemon that begins after that
    later.start()
    wait_until(lambda: later.error != "")
    assert later.n_winners == 0


def is_believed(shelf: Shelf) -> bool:
    """Whether a daemon that begins now believes what lies there."""
    news = threading.Event()
    shelf.on_news = news.set
    shelf.start()
    wait_until(lambda: news.is_set() or shelf.error != "")
    return news.is_set()


def book_of(fleet: str, made_at_s: int, signer: Signer) -> bytes:
    return sealed([Head(fleet, made_at_s, "a test", 1, 1, 1)], signer)


@pytest.mark.parametrize("other", ["s3://bucket/zerotune", "s3://bucket//zerotune/", "s3://elsewhere"])
def test_an_older_book_comes_back_under_no_other_spelling(made, shelf_of, tmp_path, monkeypatch, other) -> None:
    """Neither of whoever built the newer book, nor of whoever reads it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    signer, place = Signer.from_file(made[0].parent / "key"), tmp_path / "book"
    for made_at_s, fleet in ((200, other), (200, "s3://bucket/zerotune/")):
        place.write_bytes(book_of(fleet, made_at_s, signer))
        assert is_believed(shelf_of(place, made[1]))
        place.write_bytes(book_of("s3://bucket/zerotune/", 100, signer))
        assert not is_believed(shelf_of(place, made[1]))
    (link := tmp_path / "link").symlink_to(place)
    assert not is_believed(shelf_of(link, made[1]))


def test_two_fleets_have_books_of_one_key(made, shelf_of, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    signer = Signer.from_file(made[0].parent / "key")
    for made_at_s, fleet in ((200, "s3://bucket/one"), (100, "s3://bucket/two")):
        (place := tmp_path / str(made_at_s)).write_bytes(book_of(fleet, made_at_s, signer))
        assert is_believed(shelf_of(place, made[1]))
