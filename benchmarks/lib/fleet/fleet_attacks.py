"""What those who may write below a fleet's URL put there, to be believed or to hide others."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from zerotune.tuner.fleet.book import Book, Head, sealed
from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.objects import COLUMNS, Fabric, pack
from zerotune.tuner.fleet.shelf import Shelf
from zerotune.tuner.fleet.signing import Signer, Verifier, make_key

HONEST: Final = ("a", "b", "c")
"""Nodes whose measurements are true."""


def shared(folder: Path, name: str, *, faster: float = 0.1, job_id: str = "", is_signed: bool = True) -> Path:
    """Write an object below `fleet`."""
    block, signer = measured(40, faster=faster), signer_of(name) if is_signed else None
    job, fabric = np.zeros(len(block), np.int64), Fabric("fabric", FACTS)
    packed = pack(name, fabric, [job_id or name], job, block, 1_800_000_000, signer)
    path = folder / "fleet" / packed.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed.data)
    return path


def masked(folder: Path) -> bool:
    """Junk bears the names of others' objects."""
    (folder / "fleet" / "v1" / "zzz").mkdir(parents=True)
    for node in ("a", "b", "c"):
        (folder / "fleet" / "v1" / "zzz" / shared(folder, node).name).write_text("junk")
    return build(str(folder / "fleet"), folder / "book").merged.n_objects == 3


def says(book: Book, faster: float) -> bool:
    """Whether a book tells this gain, and no honest node was set aside."""
    gains = {round(one.gain, 1) for one in book.cells if one.gain is not None}
    return gains == {faster} and not any(one.is_set_aside for one in book.contributors if one.name in HONEST)


def eight_names(folder: Path) -> bool:
    """One writer without a key has eight names and many jobs, which lie by less than what is outlying."""
    for name in HONEST:
        shared(folder, name)
    for at in range(8):
        for job in range(4):
            shared(folder, f"liar{at}", faster=0.4, job_id=f"{at}-{job}", is_signed=False)
    return says(build(str(folder / "fleet"), folder / "book").book, 0.1)


def anothers_name(folder: Path) -> bool:
    """One writer without a key lies in two others' names, to get the honest third set aside."""
    for name in HONEST:
        shared(folder, name)
    for name in HONEST[:2]:
        for job in range(8):
            shared(folder, name, faster=3.0, job_id=f"{name}-{job}", is_signed=False)
    return says(build(str(folder / "fleet"), folder / "book").book, 0.1)


def changed_content(folder: Path) -> bool:
    """An honest object's signature stands on other rows."""
    for name in HONEST:
        path = shared(folder, name)
    table = pyarrow.parquet.read_table(path, partitioning=None)
    column = table.schema.get_field_index("duration_us")
    faster = pyarrow.compute.multiply(table["duration_us"], 0.5)
    pyarrow.parquet.write_table(table.set_column(column, "duration_us", faster), sink := io.BytesIO())
    path.with_name(f"{hashlib.sha256(sink.getvalue()).hexdigest()}.parquet").write_bytes(sink.getvalue())
    built = build(str(folder / "fleet"), folder / "book")
    return len(built.book.skipped) == 1 and says(built.book, 0.1)


def many_keys(folder: Path) -> bool:
    """One writer has eight keys, of which none is listed."""
    for name in HONEST:
        shared(folder, name)
    for at in range(8):
        shared(folder, f"liar{at}", faster=0.4)
    listed = {signer_of(name).public_hex: name for name in HONEST}
    return says(build(str(folder / "fleet"), folder / "book", listed=listed).book, 0.1)


def one_bad_entry(folder: Path) -> bool:
    """A pipe, and a name that is no text."""
    place = shared(folder, "a").parent
    os.mkfifo(place / "pipe.parquet")
    Path(os.fsdecode(os.fsencode(place) + b"/\xff.parquet")).write_text("junk")
    (place / "around").symlink_to(place, target_is_directory=True)
    return build(str(folder / "fleet"), folder / "book").merged.n_objects == 1


def bomb(text: str, facts: bytes) -> Callable[[Path], bool]:
    """An object that unpacks to far more than it is."""

    def attack(folder: Path) -> bool:
        shared(folder, "a")
        values = {"contributor": text, "job_id": "job", "fabric_id": "fabric"}
        columns = [pyarrow.array([values.get(field.name, 1)]).cast(field.type) for field in COLUMNS]
        schema = COLUMNS.with_metadata({b"zerotune.fleet": b"1", b"zerotune.fabric": facts})
        pyarrow.parquet.write_table(pyarrow.table(columns, schema), sink := io.BytesIO(), compression="zstd")
        name = hashlib.sha256(sink.getvalue()).hexdigest()
        (folder / "fleet" / "v1" / "fabric=fabric" / f"{name}.parquet").write_bytes(sink.getvalue())
        return build(str(folder / "fleet"), folder / "book").merged.n_objects == 1

    return attack


def respelled_book(folder: Path) -> bool:
    """It is older than one whose builder spelled the fleet's URL otherwise."""
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    try:
        key, signer, is_believed = make_key(folder / "key"), Signer.from_file(folder / "key"), []
        for made_at_s, url in ((200, "s3://bucket/fleet"), (100, "s3://bucket/fleet/")):
            (folder / "book").write_bytes(sealed([Head(url, made_at_s, "another", 1, 1, 1)], signer))
            shelf = Shelf(str(folder / "book"), Verifier.of(key))
            shelf.start()
            shelf.told("fabric")
            shelf.close()
            is_believed.append(not shelf.error)
        return is_believed == [True, False]
    finally:
        del os.environ["XDG_STATE_HOME"]
