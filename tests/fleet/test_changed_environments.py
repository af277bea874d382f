"""What a book knows of NCCL's variables: how they changed calls on other nodes, and where that is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from benchmarks.lib.waiting import wait_until
from zerotune.tuner.call_effects import effects_on, write_effects

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.changed_environments import call_effects
from zerotune.tuner.fleet.objects import Fabric, pack
from zerotune.tuner.fleet.shelf import Shelf
from zerotune.tuner.fleet.signing import Signer, Verifier, make_key
from zerotune.tuner.fleet.storage import Storage

WAIT_S = 30
HARDWARE = {name: value for name, value in FACTS.items() if name != "n_nodes"}


def share(url: Path, fabric_id: str, facts: dict[str, str | int | float | bool], level: float) -> None:
    """Three nodes' jobs whose calls take `exp(level)` times as long."""
    for node in range(3):
        blocks = [measured(40, level=level, seed=node) for _ in range(2)]
        blocks[1]["message_bytes"] *= 4
        block, name = np.concatenate(blocks), f"node{node}"
        job = np.zeros(len(block), np.int64)
        packed = pack(name, Fabric(fabric_id, facts), ["job"], job, block, 1_800_000_000, signer_of(name))
        Storage(str(url), writes=True).put(*packed)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Verifier]:
    folder = tmp_path_factory.mktemp("book")
    share(folder / "fleet", "usual", FACTS, 0.0)
    share(folder / "fleet", "larger", FACTS | {"NCCL_BUFFSIZE": "8388608"}, -0.2)
    share(folder / "fleet", "plugin", FACTS | {"FI_CXI_RDZV_PROTO": "alt_read"}, 0.3)
    share(folder / "fleet", "both", FACTS | {"NCCL_BUFFSIZE": "8388608", "NCCL_NTHREADS": "256"}, -0.1)
    share(folder / "fleet", "other", FACTS | {"gpu": "B200", "NCCL_NTHREADS": "128"}, 0.5)
    verifier = Verifier.of(make_key(folder / "key"))
    build(str(folder / "fleet"), folder / "book", signer=Signer.from_file(folder / "key"))
    return folder / "book", verifier


def test_a_daemon_writes_what_its_book_knows_of_this_hardware(made: tuple[Path, Verifier], tmp_path: Path) -> None:
    store_file = tmp_path / "store.db"
    shelf = Shelf(str(made[0]), made[1], store_file=store_file)
    shelf.start()
    try:
        wait_until(lambda: len(effects_on(store_file, HARDWARE)) == 3, WAIT_S)
    finally:
        shelf.close()
    found = {one.change: one for one in effects_on(store_file, HARDWARE)}
    expected = {"NCCL_BUFFSIZE=8388608": -0.2, "FI_CXI_RDZV_PROTO=alt_read": 0.3, "NCCL_NTHREADS=256": 0.1}
    assert {change: one.longer for change, one in found.items()} == pytest.approx(expected, abs=0.02)
    assert all(0.05 < one.longer_std < 0.15 and one.n_contributors == 3 for one in found.values())
    assert effects_on(store_file, HARDWARE | {"gpu": "B200"}) == [], "nothing there without that variable"


@pytest.mark.parametrize("junk", [b"", b"{}", b'[{"hardware": {}}]', b"[" * 100_000, b"\xff"])
def test_a_damaged_file_is_no_knowledge(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "store.db.elsewhere.json").write_bytes(junk)
    assert effects_on(tmp_path / "store.db", HARDWARE) == []


def test_one_kind_of_calls_says_less_than_four(made: tuple[Path, Verifier]) -> None:
    from zerotune.tuner.fleet.reading import read_book

    book = read_book(str(made[0]))
    size = min(one.size_class for one in book.cells)
    few = call_effects(book._replace(cells=tuple(one for one in book.cells if one.size_class == size)))
    many = {one.change: one for one in call_effects(book)}
    assert few
    assert all(one.longer_std > many[one.change].longer_std for one in few)


def test_impossible_cells_of_a_signed_book_do_not_hide_the_others(made: tuple[Path, Verifier], tmp_path: Path) -> None:
    from msgspec import structs

    from zerotune.tuner.fleet.reading import read_book

    book = read_book(str(made[0]))
    cells = [
        structs.replace(one, n_calls=0, n_contributors=0) if one.fabric_id == "plugin"
        else structs.replace(one, median_us=1e10) if one.fabric_id == "both"
        else one
        for one in book.cells
    ]  # fmt: skip
    write_effects(tmp_path / "store.db", call_effects(book._replace(cells=tuple(cells))))
    assert {one.change for one in effects_on(tmp_path / "store.db", HARDWARE)} == {
        "NCCL_BUFFSIZE=8388608",
        "NCCL_NTHREADS=256",
    }
