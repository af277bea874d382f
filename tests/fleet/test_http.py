"""Books and objects that a web server shows: they are read there, as by every other protocol."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from zerotune.store.errors import BookError

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
pytest.importorskip("aiohttp")
from zerotune.tuner.fleet import storage
from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.objects import Fabric, pack
from zerotune.tuner.fleet.reading import read_book
from zerotune.tuner.fleet.signing import Signer, Verifier, make_key
from zerotune.tuner.fleet.storage import Storage

DROP_S = 0.1
N_DROPS = 50


class Quiet(SimpleHTTPRequestHandler):
    """A folder, as `python -m http.server` shows it."""

    def log_message(self, *_: object) -> None:
        pass


class Dripping(Quiet):
    """Sends its answers byte by byte."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(N_DROPS))
        self.end_headers()
        with suppress(OSError):  # whoever asked has left
            for _ in range(N_DROPS):
                self.wfile.write(b"x")
                time.sleep(DROP_S)


@contextmanager
def served(handler: type[Quiet], folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of `tmp_path`, by HTTP."""
    with served(Quiet, tmp_path) as address:
        yield address


def test_a_book_is_read_and_built_from_a_web_server(tmp_path: Path, url: str) -> None:
    for node in range(3):
        block = measured(40, seed=node)
        of = Fabric("a fabric/with=signs", FACTS)
        name, job = f"node{node}", np.zeros(len(block), np.int64)
        packed = pack(name, of, ["job"], job, block, 1_800_000_000, signer_of(name))
        Storage(str(tmp_path / "fleet"), writes=True).put(*packed)
    key = Verifier.of(make_key(tmp_path / "key"))
    built = build(f"{url}/fleet", tmp_path / "book", signer=Signer.from_file(tmp_path / "key"))
    assert (built.book.head.n_rows, built.book.skipped) == (3 * len(block), ())
    assert read_book(f"{url}/book", key) == built.book
    with pytest.raises(BookError):
        read_book(f"{url}/no-book", key)


def test_a_server_that_drips_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WEB_S", 1.0)
    began_s = time.monotonic()
    with served(Dripping, tmp_path) as address:
        with pytest.raises(BookError):
            read_book(f"{address}/book", Verifier.of(make_key(tmp_path / "key")))
        waited_s = time.monotonic() - began_s
    assert waited_s < N_DROPS * DROP_S / 2
