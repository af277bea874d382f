"""Objects over the real S3 protocol, to a server on loopback (opt-in: it takes seconds to start)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of

pytest.importorskip("pyarrow")
from zerotune.tuner.fleet.objects import MAX_OBJECT_BYTES, unpack
from zerotune.tuner.fleet.storage import Storage
from zerotune.tuner.fleet.writer import FleetWriter

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    name = request.node.name.replace("_", "-")  # the server's memory is the process's
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}/fleet"
    with contextlib.suppress(Exception):
        server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def test_objects_in_a_bucket(bucket: str) -> None:
    for contributor in ("node1", "node2", "node1"):
        writer = FleetWriter(Storage(bucket, writes=True), contributor, signer_of(contributor), clock=lambda: 1.8e9)
        writer.measured("fabric", FACTS, "job", measured())
        writer.close()
        assert writer.state.n_written == 8, writer.state.error
    storage = Storage(bucket)
    tables = [unpack(path, storage.read(path, MAX_OBJECT_BYTES))[0] for path in storage.walk("v1")]
    keys = {signer_of(name).public_hex for name in ("node1", "node2")}
    assert {table["contributor"][0].as_py() for table in tables} == keys
    assert len(tables) == 2


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    writer = FleetWriter(Storage(f"{bucket[:10]}-nowhere/fleet", writes=True), "node1", signer_of("node1"))
    writer.measured("fabric", FACTS, "job", measured())
    writer.close()
    state = writer.state
    assert (state.n_written, state.n_lost) == (0, 8)
    assert state.error
