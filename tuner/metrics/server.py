"""HTTP for Prometheus: few connections at a time, each for a few seconds, so that no scraper can block the others.

prometheus_client makes the text. Its own server would start a thread per connection, without limits of number and time.
"""

from __future__ import annotations

import socketserver
import threading
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from zerotune.store.errors import UserError
from zerotune.tuner.metrics.collector import Collector

MAX_CONNECTIONS: Final = 8
CONNECTION_TIMEOUT_S: Final = 5.0


class Handler(WSGIRequestHandler):
    """One request for the metrics."""
    timeout = CONNECTION_TIMEOUT_S
    """Timeout of one read or write: a silent scraper is disconnected."""

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes come every few seconds and are not logged."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Bind without a reverse DNS lookup of our own name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve it on a thread of its own; refuse it when MAX_CONNECTIONS are open."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it, then let another connection in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Scrapers that disconnect early are not logged either."""


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT; an empty host is this machine only.

    Raises:
        UserError: it has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"{text!r} is no address for metrics", "use HOST:PORT, e.g. 127.0.0.1:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


def make_server(collector: Collector, address: tuple[str, int]) -> WSGIServer:
    """A server at `address` that has not started yet; port 0 lets the system choose.

    Raises:
        UserError: the address cannot be bound.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server = _Server(address, Handler)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise UserError(f"metrics cannot be served at {where}: {error.strerror}", "choose another HOST:PORT") from error
    server.set_app(make_wsgi_app(registry))
    return server
