"""Who is heard in a book: keys, each once; nobody in another's name, and with a list nobody else."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from zerotune.store.errors import UserError
from zerotune.tuner.cli.app import app

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from zerotune.tuner.fleet.book import Book
from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.objects import UNSIGNED, Fabric, InvalidObject, Packed, pack, unpack

HONEST = ("node1", "node2", "node3")
TRUE_GAIN, BELIEVABLE_LIE, LIE = 0.1, 0.4, 3.0
"""Logs. A believable one is no outlier among those who tell the truth."""


def share(folder: Path, name: str, *, gain: float = TRUE_GAIN, job_id: str = "job", is_signed: bool = True) -> Packed:
    block, signer = measured(40, faster=gain), signer_of(name) if is_signed else None
    job = np.zeros(len(block), np.int64)
    packed = pack(name, Fabric("fabric", FACTS), [job_id], job, block, 1_800_000_000, signer)
    put(folder, packed.path, packed.data)
    return packed


def put(folder: Path, path: str, data: bytes) -> Path:
    whole = folder / "fleet" / path
    whole.parent.mkdir(parents=True, exist_ok=True)
    whole.write_bytes(data)
    return whole


def written(table: pyarrow.Table, **options: object) -> Packed:
    """The same table as another file."""
    pyarrow.parquet.write_table(table, sink := io.BytesIO(), **options)
    name = hashlib.sha256(sink.getvalue()).hexdigest()
    return Packed(f"v1/fabric=fabric/day=2027-01-15/{name}.parquet", sink.getvalue())


def table_of(packed: Packed) -> pyarrow.Table:
    return pyarrow.parquet.read_table(io.BytesIO(packed.data), partitioning=None)


def made(folder: Path, **options: object) -> Book:
    return build(str(folder / "fleet"), folder / "book", **options).book


def gains(book: Book) -> list[float | None]:
    return [one.gain for one in book.cells if not one.is_default]


def fleet(folder: Path) -> None:
    for name in HONEST:
        share(folder, name)


def is_true(book: Book) -> bool:
    return gains(book) == pytest.approx([TRUE_GAIN] * 2, abs=0.02)


@pytest.mark.slow
def test_one_writer_under_eight_names_and_many_jobs_is_one_voice(tmp_path: Path) -> None:
    fleet(tmp_path)
    for at in range(8):
        for job in range(4):
            share(tmp_path, f"liar{at}", gain=BELIEVABLE_LIE, job_id=f"{at}-{job}", is_signed=False)
    book = made(tmp_path)
    assert is_true(book)
    assert [one.name for one in book.contributors if not one.key] == ["unsigned"]
    assert all(one.n_contributors == 4 for one in book.cells)


def test_a_key_with_many_jobs_is_one_voice(tmp_path: Path) -> None:
    fleet(tmp_path)
    for job in range(20):
        share(tmp_path, "liar", gain=BELIEVABLE_LIE, job_id=str(job))
    assert is_true(made(tmp_path))


def test_others_names_get_no_honest_one_set_aside(tmp_path: Path) -> None:
    fleet(tmp_path)
    for name in HONEST[:2]:
        for job in range(5):
            share(tmp_path, name, gain=LIE, job_id=f"{name}-{job}", is_signed=False)
    book = made(tmp_path)
    assert is_true(book)
    assert [one.shown for one in book.contributors if one.is_set_aside] == ["unsigned"]
    keys = {one.key: one.name for one in book.contributors if one.key}
    assert keys == {signer_of(name).public_hex: name for name in HONEST}


@pytest.mark.slow
def test_contributors_outside_the_list_add_nothing_to_a_book(tmp_path: Path) -> None:
    fabrics = [Fabric("fabric", {**FACTS, "gpu": "none"}), *(Fabric(f"junk{at}", FACTS) for at in range(3))]
    listed = {signer_of(name).public_hex: name for name in HONEST}
    block = measured(40)
    bad = np.concatenate([block, block[:1]])
    bad["duration_us"][-1] = np.nan
    for fabric in fabrics:  # before all others
        put(
            tmp_path, *pack("x", fabric, ["j"], np.zeros(len(bad), np.int64), bad, 1_800_000_000, signer_of("stranger"))
        )
    made(tmp_path)
    fleet(tmp_path)
    book = made(tmp_path, listed=listed)
    assert [(one.fabric_id, one.facts) for one in book.fabrics] == [("fabric", FACTS)]
    assert [(one.name, one.n_jobs) for one in book.contributors if not one.key] == [("not listed", 4)]
    assert len(book.contributors) == len(HONEST) + 1


@pytest.mark.parametrize(("n_honest", "n_liars"), [(3, 1), (5, 2)])
def test_a_minority_shifts_nobody_by_what_only_they_and_it_measured(
    tmp_path: Path, n_honest: int, n_liars: int
) -> None:
    honest, victims = [f"node{at}" for at in range(n_honest)], n_honest // 2

    def job(name: str, *blocks: np.ndarray, job_id: str = "job") -> None:
        rows = np.concatenate(blocks)
        fabric, number = Fabric("fabric", FACTS), np.zeros(len(rows), np.int64)
        put(tmp_path, *pack(name, fabric, [job_id], number, rows, 1_800_000_000, signer_of(name)))

    def own(of: int, level: float = 0.0) -> list[np.ndarray]:
        """At sizes that one victim's job alone has."""
        blocks = [measured(40, level=level) for _ in range(3)]
        for at, block in enumerate(blocks):
            block["message_bytes"] <<= 8 + 8 * of + at
        return blocks

    for at, name in enumerate(honest):
        job(name, measured(40, faster=TRUE_GAIN), *(own(at) if at < victims else ()))
    listed = {signer_of(name).public_hex: name for name in honest}
    for at in range(n_liars):
        name = f"liar{at}"
        listed[signer_of(name).public_hex] = name
        for usual in range(5):
            job(name, measured(40, faster=BELIEVABLE_LIE), job_id=f"usual-{usual}")
        for victim in range(victims):
            job(name, *own(victim, 8.0), job_id=f"shift-{victim}")
    book = made(tmp_path, listed=listed)
    assert not [one.name for one in book.contributors if one.is_set_aside and one.name in honest]
    common = [one for one in book.cells if one.n_contributors >= 3 and one.bytes_range[0] < 1 << 25]
    assert {one.n_contributors for one in common} == {len(listed)}
    assert gains(book._replace(cells=tuple(common))) == pytest.approx([TRUE_GAIN] * 2, abs=0.02)


def test_a_liar_of_another_ones_name_is_told_from_them_by_key(tmp_path: Path) -> None:
    fleet(tmp_path)
    block, liar = measured(40, faster=LIE), signer_of("liar")
    job = np.zeros(len(block), np.int64)
    put(tmp_path, *pack(HONEST[0], Fabric("fabric", FACTS), ["job"], job, block, 1_800_000_000, liar))
    made(tmp_path)
    done = CliRunner().invoke(app, ["store", "book", "show", str(tmp_path / "book")])
    (line,) = (line for line in done.output.splitlines() if line.startswith("set aside"))
    assert f"{HONEST[0]} ({liar.public_hex[:16]}" in line


def test_the_same_rows_are_the_same_whatever_parquet_makes_of_them(tmp_path: Path) -> None:
    block = measured(40)
    block["duration_us"][::5] = np.nan
    job = np.arange(len(block)) % 3
    packed = pack("node1", Fabric("fabric", FACTS), ["a", "ü", "c"], job, block, 1_800_000_000, signer_of("node1"))
    table, found = table_of(packed), unpack(*packed)
    assert found.contributor == signer_of("node1").public_hex
    for options in (
        {"compression": "none"},
        {"use_dictionary": False, "row_group_size": 7},
        {"use_dictionary": ["job_id"], "row_group_size": 1, "data_page_version": "2.0"},
        {
            "use_dictionary": False,
            "column_encoding": {"duration_us": "BYTE_STREAM_SPLIT", "step": "DELTA_BINARY_PACKED"},
        },
    ):
        again = unpack(*written(table, **options))
        assert again.content == found.content
        assert again.contributor == found.contributor


def faster(table: pyarrow.Table) -> pyarrow.Table:
    durations = pyarrow.compute.multiply(table["duration_us"], 0.5)
    return table.set_column(table.schema.get_field_index("duration_us"), "duration_us", durations)


def marked(mark: str, value: bytes) -> object:
    return lambda table: table.replace_schema_metadata({**table.schema.metadata, f"zerotune.{mark}".encode(): value})


def of(contributor: str) -> object:
    return lambda table: table.set_column(0, "contributor", pyarrow.array([contributor] * len(table)))


def test_an_unsigned_object_belongs_to_no_contributor(tmp_path: Path) -> None:
    found = unpack(*share(tmp_path, signer_of("node1").public_hex, is_signed=False))
    assert (found.contributor, set(found.rows["contributor"].to_pylist())) == (UNSIGNED, {UNSIGNED})


WRONG = (
    faster, lambda table: table.take(list(range(len(table)))[::-1]), lambda table: table.slice(1),
    marked("fabric", b"{}"), marked("contributor", b"node9"), marked("contributor", b"\xff"),
    marked("signature", b""), marked("signature", b"\xff"), marked("signature", b"0" * 128),
    of(signer_of("node9").public_hex), of(signer_of("node1").public_hex.upper()), of("node1"), of("/dev/zero"),
)  # fmt: skip


def test_each_wrong_signature_is_refused_and_named(tmp_path: Path) -> None:
    fleet(tmp_path)
    before = made(tmp_path)
    table = table_of(share(tmp_path, HONEST[0]))
    crafted = [written(change(table)) for change in WRONG]
    for one in crafted:
        with pytest.raises(InvalidObject):
            unpack(*one)
        put(tmp_path, *one)
    book = made(tmp_path)
    assert sorted(one.path for one in book.skipped) == sorted(one.path for one in crafted)
    assert book.cells == before.cells


def test_with_a_list_nobody_else_is_heard(tmp_path: Path) -> None:
    fleet(tmp_path)
    for at in range(8):
        share(tmp_path, f"liar{at}", gain=LIE)
    share(tmp_path, "anybody", gain=LIE, is_signed=False)
    assert gains(made(tmp_path))[0] > 1, "keys cost nothing"
    lines = [f"{signer_of(name).public_hex.upper()}\tthe {name}  # rack 7\n" for name in HONEST]
    (tmp_path / "list").write_text("# our nodes\n\n" + "".join(lines))
    words = ["store", "book", "build", str(tmp_path / "fleet"), "--out", str(tmp_path / "book"), "--json"]
    done = CliRunner().invoke(app, [*words, "--contributors", str(tmp_path / "list")])
    assert json.loads(done.stdout)["set_aside"] == ["not listed"]
    book = made(tmp_path, listed={signer_of(name).public_hex: f"the {name}" for name in HONEST})
    assert is_true(book)
    assert {one.name for one in book.contributors} == {"the node1", "the node2", "the node3", "not listed"}
    assert next(one.n_jobs for one in book.contributors if one.is_set_aside) == 9
    assert gains(made(tmp_path))[0] > 1, "the next build may be without a list"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"{signer_of('node1').public_hex} node1\nnode2\n", "line 2: 'node2'"),
        ("0" * 63, "line 1"), ("", ""), ("# nobody\n", ""), ("\udcff", ""), (None, ""),
    ],
)  # fmt: skip
def test_a_list_that_is_none(tmp_path: Path, text: str | None, named: str) -> None:
    fleet(tmp_path)
    if text is not None:
        (tmp_path / "list").write_text(text, errors="surrogateescape")
    words = ["store", "book", "build", str(tmp_path / "fleet"), "--out", str(tmp_path / "book")]
    done = CliRunner().invoke(app, [*words, "--contributors", str(tmp_path / "list")])
    assert isinstance(done.exception, UserError)
    assert str(tmp_path / "list") in done.exception.problem
    assert named in done.exception.problem
    assert done.exception.remedy
    assert not (tmp_path / "book").exists()
