"""Books: what jobs say together, who is set aside, what is skipped, and whose signature counts."""

from __future__ import annotations

import math
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from zerotune.store.errors import BookError, UserError

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
from zerotune.tuner.fleet.book import MAX_FABRICS, MAX_FACTS, MAX_LINES, Book, opened
from zerotune.tuner.fleet.building import Built, build
from zerotune.tuner.fleet.objects import Fabric, pack
from zerotune.tuner.fleet.reading import read_book
from zerotune.tuner.fleet.signing import Signer, Verifier, make_key, public_path
from zerotune.tuner.fleet.storage import Storage

AT_S = 1_800_000_000


def share(url: Path, contributor: str, job_id: str, block: np.ndarray, fabric_id: str = "fabric") -> Path:
    job, signer = np.zeros(len(block), np.int64), signer_of(contributor)
    packed = pack(contributor, Fabric(fabric_id, FACTS), [job_id], job, block, AT_S, signer)
    Storage(str(url), writes=True).put(*packed)
    return url / packed.path


def share_fleet(url: Path, n_nodes: int = 5, n_jobs: int = 2) -> None:
    """Nodes whose network is fast or slow, and whose jobs agree on what ring/ll128 gains: 10 %."""
    for node in range(n_nodes):
        for job in range(n_jobs):
            block = measured(40, level=0.1 * node, seed=10 * node + job)
            share(url, f"node{node}", f"job{node}-{job}", block)


def made(url: Path, out: Path, **options: object) -> Built:
    return build(str(url), out, **options)


def told(book: Book) -> dict[tuple[int, str], tuple[float, int]]:
    """Gain and jobs of each winner, by bytes and setting."""
    return {
        (one.bytes_range[0], str(one.candidate)): (one.gain if one.gain is not None else math.nan, one.n_jobs)
        for one in book.winners()
    }


def test_jobs_agree_on_a_winner_whatever_their_level(tmp_path: Path) -> None:
    share_fleet(tmp_path / "fleet")
    built = made(tmp_path / "fleet", tmp_path / "book")
    book = read_book(str(tmp_path / "book"))
    assert book == built.book
    winners = told(book)
    assert set(winners) == {(1 << 20, "ring/ll128/8ch"), (1 << 24, "ring/ll128/8ch")}
    for gain, n_jobs in winners.values():
        assert gain == pytest.approx(0.1, abs=0.01)
        assert n_jobs == 10
    assert not any(one.is_set_aside for one in book.contributors)
    (default,) = (one for one in book.cells if one.is_default and one.bytes_range[0] == 1 << 20)
    assert default.median_us == pytest.approx((1 << 20) / 1e4 * math.exp(0.2), rel=0.05), "at the usual level"
    assert (default.n_calls, default.n_contributors) == (200, 5)


def test_each_job_counts_once(tmp_path: Path) -> None:
    """A job with a hundred times as many calls has one voice."""
    for node in range(4):
        share(tmp_path / "fleet", f"node{node}", f"job{node}", measured(40, seed=node))
    share(tmp_path / "fleet", "node4", "long", measured(4000, faster=-0.05))
    book = made(tmp_path / "fleet", tmp_path / "book").book
    assert [gain for gain, _ in told(book).values()] == pytest.approx([0.1, 0.1], abs=0.01)


@pytest.mark.parametrize("lie", ["fast", "slow clock", "impossible"])
@pytest.mark.slow
def test_a_liar_is_set_aside_and_named(tmp_path: Path, lie: str) -> None:
    share_fleet(tmp_path / "fleet", 4)
    block = measured(40, seed=99)
    if lie == "fast":
        block["duration_us"][block["is_default"] == 0] /= 50
    elif lie == "slow clock":
        block["duration_us"] *= 1000
    else:
        block["duration_us"][::4] = math.nan
        block["n_channels"][1::4] = 200
        block["duration_us"][2::4] = -5.0
        block["duration_us"][3::4] = 1e300
    share(tmp_path / "fleet", "liar", "job", block)
    book = made(tmp_path / "fleet", tmp_path / "book").book
    assert [gain for gain, _ in told(book).values()] == pytest.approx([0.1, 0.1], abs=0.01)
    (named,) = (one for one in book.contributors if one.name == "liar")
    if lie == "impossible":
        assert named.n_refused_rows == len(block)
    else:
        assert named.is_set_aside
    assert not any(one.is_set_aside for one in book.contributors if one.name != "liar")
    assert all(one.n_contributors == 4 for one in book.cells)


def test_fabrics_are_told_apart(tmp_path: Path) -> None:
    for node in range(3):
        share(tmp_path / "fleet", f"node{node}", "job", measured(40), "one")
        share(tmp_path / "fleet", f"node{node}", "other", measured(40, faster=-0.1), "two")
    book = made(tmp_path / "fleet", tmp_path / "book").book
    assert {one.fabric_id for one in book.winners()} == {"one"}
    assert {one.fabric_id for one in book.cells} == {"one", "two"}


@pytest.mark.slow
def test_a_later_build_reads_new_objects_only_and_says_the_same_as_one_of_all(tmp_path: Path) -> None:
    url = tmp_path / "fleet"
    share_fleet(url, 3)
    made(url, tmp_path / "book")
    for path in sorted(url.rglob("*.parquet"))[:3]:
        path.write_bytes(b"")  # nobody looks at them again
    share(url, "node9", "job9", measured(40, seed=9))
    more = measured(40, seed=77)
    more["step"] += 1000
    share(url, "node0", "job0-0", more)
    built = made(url, tmp_path / "book")
    assert (built.merged.n_objects, built.merged.n_known, built.n_jobs_new) == (2, 6, 2)
    clean = tmp_path / "clean"
    share_fleet(clean, 3)
    share(clean, "node9", "job9", measured(40, seed=9))
    share(clean, "node0", "job0-0", more)
    assert made(clean, tmp_path / "again").book.cells == built.book.cells


@pytest.mark.slow
def test_bad_objects_are_skipped_and_named(tmp_path: Path) -> None:
    url = tmp_path / "fleet"
    share_fleet(url, 3)
    good = made(url, tmp_path / "good").book
    cut, moved = share(url, "node7", "cut", measured()), share(url, "node8", "moved", measured())
    cut.write_bytes(cut.read_bytes()[:-10])
    elsewhere = url / "v1" / "fabric=other" / moved.parent.name / moved.name
    elsewhere.parent.mkdir(parents=True)
    moved.rename(elsewhere)
    (url / "v1" / "notes.txt").write_text("hello")
    (url / "v1" / f"{'0' * 64}.parquet").write_bytes(b"PAR1")
    book = made(url, tmp_path / "book").book
    assert len(book.skipped) == 4
    assert all(one.reason for one in book.skipped)
    assert book.cells == good.cells


def test_a_folder_without_our_objects_gives_no_book(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        made(tmp_path / "nowhere", tmp_path / "book")
    share_fleet(tmp_path / "fleet", 1)
    built = made(tmp_path / "fleet", tmp_path / "book")
    assert built.book.cells, "a mistyped URL leaves nothing in the way of the right one"
    with pytest.raises(UserError):
        made(tmp_path / "nowhere", tmp_path / "book")
    made(tmp_path / "fleet", tmp_path / "book2")
    (tmp_path / "book2.merged").write_bytes(b"junk" * 5000)
    with pytest.raises(UserError):
        made(tmp_path / "fleet", tmp_path / "book2")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Verifier, Verifier]:
    """A signed book, its key, and another's."""
    folder = tmp_path_factory.mktemp("signed")
    share_fleet(folder / "fleet", 3)
    make_key(folder / "key")
    make_key(folder / "other")
    made(folder / "fleet", folder / "book", signer=Signer.from_file(folder / "key"))
    ours, others = (Verifier.of(str(public_path(folder / name))) for name in ("key", "other"))
    assert Verifier.of(ours.public_hex).public_hex == ours.public_hex
    return (folder / "book").read_bytes(), ours, others


def test_a_book_is_believed_with_the_right_signature_only(signed: tuple[bytes, Verifier, Verifier]) -> None:
    data, ours, others = signed
    book = opened(data, "book", ours)
    assert book.signed_by == ours.public_hex
    assert opened(data, "book").cells == book.cells
    with pytest.raises(BookError):
        opened(data, "book", others)
    with pytest.raises(BookError) as cut:
        opened(data[:-20], "book", ours)
    assert "--book-key" not in cut.value.remedy, "the key is the right one"
    unsigned = b'{"zerotune_book":1}\n' + data.partition(b"\n")[2]
    assert opened(unsigned, "book").cells == book.cells
    with pytest.raises(BookError):
        opened(unsigned, "book", ours)
    for junk in (b"", b"\n", b"[]", b'{"zerotune_book":2}\n', b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(BookError):
            opened(junk, "book")


def test_a_book_of_nothing_but_ends_of_lines_or_of_one_line_takes_little_memory(
    signed: tuple[bytes, Verifier, Verifier],
) -> None:
    body = signed[0].partition(b"\n")[2]
    n_more = 1 << 18
    one_line = b'{"type":"fabric","fabric_id":"f","facts":{' + b'"a":1,' * 400_000 + b'"b":1}}\n'
    for more, n_unusable in ((b"\n" * n_more, n_more), (one_line, 1)):
        data = b'{"zerotune_book":1}\n' + body + more
        tracemalloc.start()
        try:
            book = opened(data, "book")
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert book.n_unusable == n_unusable
        assert peak_bytes < 3 * len(data) + (1 << 19)


def test_a_book_of_many_lines_or_facts_is_refused_or_left_out(signed: tuple[bytes, Verifier, Verifier]) -> None:
    body = b'{"zerotune_book":1}\n' + signed[0].partition(b"\n")[2]
    with pytest.raises(BookError):
        opened(body + b"\n" * MAX_LINES, "book")
    n_known = len(opened(body, "book").fabrics)

    def fabric(at: int, n_facts: int) -> bytes:
        facts = ",".join(f'"{one}":1' for one in range(n_facts))
        return b'{"type":"fabric","fabric_id":"%d","facts":{%s}}\n' % (at, facts.encode())

    found = opened(body + fabric(0, MAX_FACTS) + fabric(1, MAX_FACTS + 1), "book")
    assert (len(found.fabrics), found.n_unusable) == (n_known + 1, 1)
    found = opened(body + b"".join(fabric(at, 0) for at in range(MAX_FABRICS)), "book")
    assert (len(found.fabrics), found.n_unusable) == (MAX_FABRICS, n_known)


@given(data=st.data())
def test_no_byte_of_a_signed_book_can_be_changed(signed: tuple[bytes, Verifier, Verifier], data: st.DataObject) -> None:
    good, ours, _ = signed
    at, flip = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(good)
    changed[at] ^= flip
    try:
        book = opened(bytes(changed), "book", ours)
    except BookError:
        return
    assert book == opened(good, "book", ours), "at most the case of a letter in the seal"


def test_private_keys_stay_private(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError):
        make_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    for refused in (tmp_path / "key", tmp_path / "none", public_path(tmp_path / "key")):
        with pytest.raises(UserError):
            Signer.from_file(refused)
    for text in (str(tmp_path / "key"), "none", "00"):
        with pytest.raises(UserError):
            Verifier.of(text)


def test_a_build_within_little_memory(tmp_path: Path) -> None:
    began_s = time.monotonic()
    for node in range(3):
        share(tmp_path / "fleet", f"node{node}", f"job{node}", measured(20_000, seed=node))
    book = made(tmp_path / "fleet", tmp_path / "book", memory_mb=64).book
    assert book.head.n_rows == 120_000
    assert time.monotonic() - began_s < 60
