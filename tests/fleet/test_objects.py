"""Objects: what comes back of what was written, and what is not believed."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("cryptography")
from zerotune.tuner.fleet import objects  # noqa: E402
from zerotune.tuner.fleet.objects import Fabric, InvalidObject, Packed, pack, unpack  # noqa: E402

AT_S = 1_800_000_000


def packed(fabric_id: str = "fabric", contributor: str = "node1", job_id: str = "job") -> Packed:
    block = measured()
    job, signer = np.zeros(len(block), np.int64), signer_of(contributor)
    return pack(contributor, Fabric(fabric_id, FACTS), [job_id], job, block, AT_S, signer)


GOOD = packed()


@given(fabric_id=st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable()), job_id=st.text(min_size=1))
def test_objects_give_back_the_rows_written(fabric_id: str, job_id: str) -> None:
    made = packed(fabric_id, job_id=job_id.encode("utf-8", "replace").decode())
    assert made.path.count("/") == 3, "whatever the id, it is one folder's name"
    table, fabric, contributor, called, _ = unpack(*made)
    assert fabric == Fabric(fabric_id, FACTS)
    assert (contributor, called) == (signer_of("node1").public_hex, "node1")
    assert sorted(table["duration_us"].to_pylist()) == sorted(measured()["duration_us"].tolist())
    assert set(table["tuner_abi"].to_pylist()) == {5}


def test_the_same_rows_are_the_same_object_in_any_order() -> None:
    block = measured()[::-1]
    job, signer = np.zeros(len(block), np.int64), signer_of("node1")
    again = pack("node1", Fabric("fabric", FACTS), ["job"], job, block, AT_S, signer)
    assert again == GOOD
    assert packed(contributor="node2").path != GOOD.path


@given(st.integers(0, len(GOOD.data) - 1), st.integers(1, 255), st.booleans())
def test_no_damaged_object_is_believed_even_under_the_name_of_what_it_is(at: int, flip: int, renamed: bool) -> None:
    data = bytearray(GOOD.data)
    data[at] ^= flip
    path = GOOD.path
    if renamed:
        path = f"{path.rpartition('/')[0]}/{hashlib.sha256(data).hexdigest()}.parquet"
        try:
            table = unpack(path, bytes(data)).rows
        except InvalidObject:
            return
        assert table.schema.equals(objects.COLUMNS)
        return
    with pytest.raises(InvalidObject):
        unpack(path, bytes(data))


def rows_of(one: Packed) -> pyarrow.Table:
    return pyarrow.parquet.read_table(io.BytesIO(one.data), partitioning=None)


def unsigned(**changes: str) -> pyarrow.Table:
    table = rows_of(packed(**changes))
    metadata = {name: value for name, value in table.schema.metadata.items() if name != b"zerotune.signature"}
    return table.replace_schema_metadata(metadata)


def _named(table: object, folder: str = GOOD.path.rpartition("/")[0]) -> tuple[str, bytes]:
    sink = io.BytesIO()
    with pyarrow.parquet.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(table.schema.metadata)
    return f"{folder}/{hashlib.sha256(sink.getvalue()).hexdigest()}.parquet", sink.getvalue()


@pytest.mark.parametrize("n_bytes", [0, 1, 100, len(GOOD.data) // 2, len(GOOD.data) - 1])
def test_cut_objects(n_bytes: int) -> None:
    data = GOOD.data[:n_bytes]
    with pytest.raises(InvalidObject):
        unpack(f"{GOOD.path.rpartition('/')[0]}/{hashlib.sha256(data).hexdigest()}.parquet", data)


def test_objects_of_others() -> None:
    table = unsigned()
    metadata = table.schema.metadata
    column = table.schema.get_field_index("duration_us")
    empty = table.set_column(column, "duration_us", pyarrow.nulls(table.num_rows, pyarrow.float64()))
    two = pyarrow.concat_tables([table, unsigned(fabric_id="other")])
    for other in (
        table.replace_schema_metadata({}),
        table.replace_schema_metadata({**metadata, b"zerotune.fleet": b"2"}),
        table.replace_schema_metadata({**metadata, b"zerotune.fabric": b"{"}),
        table.replace_schema_metadata({**metadata, b"zerotune.fabric": b"[" * 100_000}),
        table.drop_columns(["step"]),
        table.append_column("more", table["step"]),
        table.slice(0, 0),
        empty,
        two,
    ):
        with pytest.raises(InvalidObject):
            unpack(*_named(other))
    with pytest.raises(InvalidObject):
        unpack(*_named(table, "v1/fabric=another/day=2027-01-15"))


@pytest.mark.parametrize("name", ["contributor", "job_id", "fabric_id"])
def test_long_texts_are_refused_before_they_take_room(name: str) -> None:
    """One text of a megabyte in every row: 60 KB in the file, 20 GB in full."""
    table = unsigned()
    table = table.take(np.zeros(20_000, np.int64))
    ids = pyarrow.DictionaryArray.from_arrays(np.zeros(len(table), np.int32), pyarrow.array(["x" * 2**20]))
    column = table.schema.get_field_index(name)
    with pytest.raises(InvalidObject, match=name):
        unpack(*_named(table.set_column(column, name, ids)))
    assert pyarrow.total_allocated_bytes() < 2**30


@pytest.mark.parametrize(
    "value", ["1" + 400 * "0", "1e999", "NaN", '"\\ud800"', '"' + 5000 * "x" + '"', "null", "[1]", "{}"]
)
def test_facts_that_no_book_can_hold_are_left_out(value: str) -> None:
    table = unsigned()
    facts = f'{{"gpu": "H100", "more": {value}}}'.encode()
    described = {**table.schema.metadata, b"zerotune.fabric": facts}
    assert unpack(*_named(table.replace_schema_metadata(described))).fabric.facts == {"gpu": "H100"}
