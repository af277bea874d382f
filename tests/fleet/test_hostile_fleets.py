"""Below a fleet's URL many may write: what one of them puts there hides nobody else's, and takes little."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from zerotune.store.errors import UserError

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")
pytest.importorskip("cryptography")
import duckdb
import pyarrow
import pyarrow.parquet

from zerotune.tuner.fleet.building import STATE_SUFFIX, build
from zerotune.tuner.fleet.objects import COLUMNS, Fabric, InvalidObject, Packed, pack, unpack

FABRIC = Fabric("fabric", FACTS)
MAX_MIB = 256


def shared(root: Path, node: str) -> Path:
    """An honest object."""
    block = measured(40)
    job = np.zeros(len(block), np.int64)
    packed = pack(node, FABRIC, [f"job-{node}"], job, block, 1_800_000_000, signer_of(node))
    path = root / packed.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed.data)
    return path


def crafted(*, text: str = "node", facts: bytes = b"{}", n_rows: int = 1) -> Packed:
    """An object of one row, repeated, with such a contributor and such facts."""
    values = {"contributor": text, "job_id": "job", "fabric_id": FABRIC.fabric_id}
    columns = [pyarrow.repeat(pyarrow.scalar(values.get(field.name, 1)).cast(field.type), n_rows) for field in COLUMNS]
    schema = COLUMNS.with_metadata({b"zerotune.fleet": b"1", b"zerotune.fabric": facts})
    pyarrow.parquet.write_table(pyarrow.table(columns, schema), sink := io.BytesIO(), compression="zstd")
    data = sink.getvalue()
    name = hashlib.sha256(data).hexdigest()
    return Packed(f"v1/fabric={FABRIC.fabric_id}/day=2027-01-01/{name}.parquet", data)


def test_junk_under_anothers_name_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("zerotune.tuner.fleet.merging.READERS", 4)
    honest = [shared(tmp_path / "fleet", node) for node in ("a", "b", "c")]
    junk = tmp_path / "fleet" / "v1" / "zzz"
    junk.mkdir()
    for path in honest[1:]:
        (junk / path.name).write_text("junk")
    first = build(str(tmp_path / "fleet"), tmp_path / "book")
    assert first.merged.n_objects == 3
    assert {path for path, _ in first.merged.skipped} == {f"v1/zzz/{path.name}" for path in honest[1:]}
    again = build(str(tmp_path / "fleet"), tmp_path / "book")
    assert (again.merged.n_objects, again.merged.skipped) == (0, ()), "what was told is not told again"


def test_an_object_that_arrives_whole_later_is_believed(tmp_path):
    shared(tmp_path / "fleet", "a")
    late = shared(tmp_path / "fleet", "b")
    data = late.read_bytes()
    late.write_bytes(data[:-1])
    assert build(str(tmp_path / "fleet"), tmp_path / "book").merged.n_objects == 1
    late.write_bytes(data)
    built = build(str(tmp_path / "fleet"), tmp_path / "book")
    assert built.merged.n_objects == 1
    assert built.book.skipped == ()


def test_one_bad_entry_is_named_and_the_others_are_read(tmp_path):
    path = shared(tmp_path / "fleet", "a")
    os.mkfifo(path.with_name("pipe.parquet"))
    Path(os.fsdecode(os.fsencode(path.parent) + b"/\xff\xfe.parquet")).write_text("junk")
    (path.parent / "around").symlink_to(path.parent, target_is_directory=True)
    (path.parent / "nowhere.parquet").symlink_to("none")
    built = build(str(tmp_path / "fleet"), tmp_path / "book")
    assert built.merged.n_objects == 1
    assert len(built.merged.skipped) == 3
    assert any(r"\udcff" in one.path for one in built.book.skipped)


@pytest.mark.parametrize(
    "bomb",
    [
        {"text": "x" * (64 << 20)},
        {"facts": b'{"a":"' + b"x" * (32 << 20) + b'"}'},
        {"facts": json.dumps({str(at): "x" * 4000 for at in range(100)}).encode()},
        {"n_rows": 3_000_000},
    ],
    ids=["text", "a fact", "facts", "rows"],
)
def test_a_bomb_takes_no_memory_of_ours(bomb):
    packed = crafted(**bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidObject):
        unpack(*packed)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MAX_MIB


def of_another_user(state: Path) -> None:
    os.chown(state, 25_001, 25_001)


def with_a_view(state: Path) -> None:
    with duckdb.connect(str(state)) as connection:
        connection.execute("ALTER TABLE fabrics RENAME TO others")
        connection.execute("CREATE VIEW fabrics AS SELECT fabric_id, facts FROM others")


def as_a_link(state: Path) -> None:
    state.rename(state.with_name("elsewhere"))
    state.symlink_to("elsewhere")
    os.lchown(state, 25_001, 25_001)


@pytest.mark.parametrize("change", [of_another_user, with_a_view, as_a_link])
def test_a_state_file_that_others_could_change_is_not_signed(tmp_path, change):
    if change is not with_a_view and os.getuid() != 0:
        pytest.skip("gives a file to another user: needs root")
    shared(tmp_path / "fleet", "a")
    build(str(tmp_path / "fleet"), tmp_path / "book")
    change(tmp_path / f"book{STATE_SUFFIX}")
    with pytest.raises(UserError, match=STATE_SUFFIX):
        build(str(tmp_path / "fleet"), tmp_path / "book")
