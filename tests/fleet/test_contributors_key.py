"""The key by which a daemon signs what it measured: made once beside its store, for this user alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.lib.fleet.fleet_rows import FACTS, measured
from zerotune.store.errors import UserError
from zerotune.tuner.cli.app import app

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
from zerotune.tuner.cli.fleet_options import KEY_SUFFIX, fleet_writer
from zerotune.tuner.fleet.objects import unpack
from zerotune.tuner.fleet.signing import Verifier, make_key, public_path


def written(folder: Path, store: Path) -> str:
    """The key that signs what a daemon with this store writes."""
    writer = fleet_writer(str(folder), "node1", store)
    assert writer is not None
    writer.measured("fabric", FACTS, "job", measured())
    writer.close()
    (path,) = folder.rglob("*.parquet")
    found = unpack(str(path.relative_to(folder)), path.read_bytes())
    assert found.contributor == writer.state.key
    return writer.state.key


def test_it_is_made_once_and_survives_a_restart(tmp_path: Path) -> None:
    store = tmp_path / "own" / "store.db"
    before = os.umask(0)
    try:
        first = written(tmp_path / "one", store)
    finally:
        os.umask(before)
    kept = store.with_name(store.name + KEY_SUFFIX)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert Verifier.of(str(public_path(kept))).public_hex == first
    assert {one.name for one in store.parent.iterdir()} == {kept.name, public_path(kept).name}, "nothing else is left"
    assert written(tmp_path / "two", store) == first
    assert written(tmp_path / "three", tmp_path / "other" / "store.db") != first, "another store has another key"


def open_to_others(key: Path) -> None:
    make_key(key)
    key.chmod(0o644)


def junk(key: Path) -> None:
    key.write_bytes(b"")
    key.chmod(0o600)


def link(key: Path) -> None:
    make_key(key.with_name("elsewhere"))
    key.symlink_to("elsewhere")


def pipe(key: Path) -> None:
    os.mkfifo(key, 0o600)


def of_another_user(key: Path) -> None:
    if os.getuid():
        pytest.skip("gives a file to another user: needs root")
    make_key(key)
    os.chown(key, 25_001, 25_001)


def in_a_folder_of_all(key: Path) -> None:
    key.parent.chmod(0o777)


@pytest.mark.parametrize("spoil", [open_to_others, junk, link, pipe, of_another_user, in_a_folder_of_all])
def test_a_daemon_that_cannot_keep_one_says_so_and_does_not_start(tmp_path: Path, spoil: object) -> None:
    store = tmp_path / "own" / "store.db"
    store.parent.mkdir()
    spoil(store.with_name(store.name + KEY_SUFFIX))
    words = ["daemon", "--fleet", str(tmp_path / "fleet"), "--store", str(store), "--endpoint", f"ipc://{tmp_path}/d"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError)
    assert KEY_SUFFIX in done.exception.problem
    assert done.exception.remedy
    assert "\n" not in str(done.exception)
