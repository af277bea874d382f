"""What is written on a full disk: one line says so, nothing broken is left behind, and what was there stays."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from report_material import make_store

from zerotune.agent.session import Session
from zerotune.agent.settings import AgentSettings
from zerotune.store.atomic_file import atomic_write
from zerotune.store.errors import UserError
from zerotune.store.sqlite.database import Store
from zerotune.tuner.offline import plots
from zerotune.tuner.offline.export import export_measurements, export_plan, export_table
from zerotune.tuner.offline.report import gather, write_page
from zerotune.tuner.service.endpoint import make_keys

ROOM_BYTES = 16


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes, as on a disk with hardly any room. Compiled modules would be cut short."""
    compiled, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = compiled


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_store(tmp_path_factory.mktemp("store") / "store.db")
    with Store.open(path, read_only=True):  # what SQLite needs beside it has its room
        yield path


def picture(_: Path, out: Path) -> None:
    plots.save(plots.new_figure(1.0, 1)[0], out)


def page(store_path: Path, out: Path) -> None:
    write_page(gather(store_path, None, (), ()), out)


def parquet(store_path: Path, out: Path) -> None:
    pytest.importorskip("pyarrow")
    export_measurements(store_path, out)


@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (export_plan, "plan.json"),
        (partial(export_table, "nvidia-csv"), "tuner.conf"),
        (export_measurements, "measurements.csv"),
        (parquet, "measurements.parquet"),
        (picture, "picture.png"),
        (picture, "picture.svg"),
        (page, "report.html"),
    ],
)
def test_a_full_disk_leaves_nothing_broken(
    store_path: Path, tmp_path: Path, write: Callable[[Path, Path], object], name: str, was_there: bool
):
    out = tmp_path / name
    if was_there:
        out.write_text("before")
    with full_disk(), pytest.raises(UserError, match=name):
        write(store_path, out)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if was_there else [])
    if was_there:
        assert out.read_text() == "before"


def test_a_summary_that_finds_no_room_is_one_line(tmp_path: Path, caplog):
    session = Session(AgentSettings("ipc://nowhere", "job", summary_path=tmp_path / "after.json"), None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        session.on_boundary()
    finally:
        dist.destroy_process_group()
    with full_disk():
        session.close()
    (record,), path = caplog.records, tmp_path / "after.json"
    assert str(path) in record.getMessage()
    assert record.exc_info is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("was_there", [False, True])
def test_keys_that_find_no_room_leave_nothing_behind(tmp_path: Path, was_there: bool):
    folder = tmp_path / "keys"
    if was_there:
        folder.mkdir()
        (folder / "notes").write_text("mine")
    with full_disk(), pytest.raises(UserError, match=str(folder)):
        make_keys(folder)
    assert [path.name for path in tmp_path.rglob("*")] == (["keys", "notes"] if was_there else [])
    make_keys(folder)
    with pytest.raises(UserError, match="already"):
        make_keys(folder)
    assert len(list(folder.glob("*.key*"))) == 4


def test_a_store_that_finds_no_room_leaves_nothing_behind(tmp_path: Path):
    with full_disk(), pytest.raises(UserError, match=r"store\.db"):
        Store.open(tmp_path / "store.db")
    assert not list(tmp_path.iterdir())


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path):
    (tmp_path / "link").symlink_to("target")
    with atomic_write(tmp_path / "link") as partial:
        partial.write_text("text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"
    with atomic_write(Path("/dev/null")) as partial:
        partial.write_text("text")
    assert Path("/dev/null").is_char_device()
