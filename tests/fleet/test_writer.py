"""A daemon's way to the fleet: objects arrive whole, nothing waits for a bad URL, nothing is written over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from benchmarks.lib.waiting import wait_until
from zerotune.store.errors import UserError

pytest.importorskip("pyarrow")
from zerotune.tuner.fleet import writer as writing
from zerotune.tuner.fleet.objects import MAX_OBJECT_BYTES, Packed, unpack
from zerotune.tuner.fleet.storage import Storage, shown
from zerotune.tuner.fleet.writer import FleetWriter

WAIT_S = 30


def found(url: str) -> list[Packed]:
    storage = Storage(url)
    return [Packed(path, storage.read(path, MAX_OBJECT_BYTES)) for path in storage.walk("v1")]


@pytest.fixture(params=["directory", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "fleet") if request.param == "directory" else f"memory://{tmp_path.name}/fleet"


def test_measurements_arrive_in_one_object_per_fabric(url: str) -> None:
    writer = FleetWriter(Storage(url, writes=True), "node1", signer_of("node1"))
    for job_id, fabric_id in (("a", "one"), ("b", "one"), ("c", "two")):
        writer.measured(fabric_id, FACTS, job_id, measured())
    writer.close()
    tables = [unpack(*one)[0] for one in found(url)]
    jobs = {frozenset(table["job_id"].to_pylist()) for table in tables}
    assert jobs == {frozenset("ab"), frozenset("c")}
    state = writer.state
    assert (state.n_objects, state.n_written, state.n_waiting, state.n_lost) == (2, 24, 0, 0)
    assert not state.is_failing


def test_only_good_measurements_of_this_node_are_shared(url: str) -> None:
    writer = FleetWriter(Storage(url, writes=True), "node1", signer_of("node1"))
    block = measured(2)
    block["source"][0], block["outcome"][1] = 1, 2
    writer.measured("fabric", FACTS, "job", block)
    writer.close()
    assert writer.state.n_written == 2


def test_the_same_object_twice_is_one(url: str) -> None:
    for _ in range(2):
        writer = FleetWriter(Storage(url, writes=True), "node1", signer_of("node1"), clock=lambda: 1.8e9)
        writer.measured("fabric", FACTS, "job", measured())
        writer.close()
        assert writer.state.n_lost == 0
    assert len(found(url)) == 1


class Stubborn(Storage):
    """Fails, or blocks, until it is told not to."""

    def __init__(self, url: str) -> None:
        super().__init__(url, writes=True)
        self.fails, self.may_go_on = True, threading.Event()
        self.n_tried = 0

    def put(self, path: str, data: bytes) -> None:
        self.n_tried += 1
        if self.fails:
            raise PermissionError("read-only")
        self.may_go_on.wait(WAIT_S)
        super().put(path, data)


@pytest.fixture
def stubborn(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubborn]:
    monkeypatch.setattr(writing, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(writing, "CLOSE_S", 0.2)
    storage = Stubborn(url)
    yield storage
    storage.may_go_on.set()


def test_a_failing_url_is_tried_again_and_loses_nothing_that_fits_in_memory(stubborn: Stubborn) -> None:
    writer = FleetWriter(stubborn, "node1", signer_of("node1"), write_every_s=0.01)
    writer.measured("fabric", FACTS, "job", measured())
    wait_until(lambda: stubborn.n_tried > 1)
    state = writer.state
    assert state.is_failing
    assert "PermissionError" in state.error
    assert (state.n_waiting, state.n_written) == (8, 0)
    stubborn.fails = False
    stubborn.may_go_on.set()
    wait_until(lambda: writer.state.n_written == 8)
    assert not writer.state.is_failing
    writer.close()
    assert len(found(stubborn.url)) == 1


def test_a_url_that_never_answers_holds_up_nobody(stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_WAITING_ROWS", 20)
    stubborn.fails = False
    writer = FleetWriter(stubborn, "node1", signer_of("node1"), write_every_s=0.01)
    began_s = time.monotonic()
    for _ in range(1000):
        writer.measured("fabric", FACTS, "job", measured())
    wait_until(lambda: stubborn.n_tried == 1)
    assert writer.state.n_waiting == 20
    writer.close()
    assert time.monotonic() - began_s < WAIT_S / 2
    assert writer.state.n_lost == 8000


def test_urls_that_cannot_be_written() -> None:
    for url in ("nonsense://bucket/x", "https://example.org/fleet", "http://example.org"):
        with pytest.raises(UserError) as caught:
            Storage(url, writes=True)
        assert caught.value.remedy
    assert Storage("https://example.org/fleet").url


def test_no_secret_is_shown() -> None:
    assert shown("s3://key:secret@bucket/x?token=1") == "s3://...@bucket/x"
    assert shown("/data/fleet") == "/data/fleet"


KILLED = """
import sys
from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from zerotune.tuner.fleet.storage import Storage
from zerotune.tuner.fleet.writer import FleetWriter
writer = FleetWriter(Storage(sys.argv[1], writes=True), "node1", signer_of("node1"), write_every_s=0.001)
for job in range(10**6):
    writer.measured("fabric", FACTS, str(job), measured(2000))
    print(flush=True)
"""


def test_kill_9_leaves_whole_objects_only(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        wait_until(lambda: bool(process.stdout) and len(list(Storage(str(tmp_path)).walk("v1"))) > 3)
        os.kill(process.pid, signal.SIGKILL)
    whole = found(str(tmp_path))
    assert len(whole) > 2
    assert all(np.isfinite(unpack(*one)[0]["duration_us"].to_numpy()).all() for one in whole)
