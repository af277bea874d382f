"""HTTP for Prometheus: few connections at a time, each for a few seconds, so that no scraper can block the others.

prometheus_client makes the text. Its own server would start a thread per connection, with no limits of number and time.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from ...store.errors import UserError
from .collector import Collector

MAX_CONNECTIONS: Final = 8
"""Most connections; for one more, the oldest is closed."""
CONNECTION_TIMEOUT_S: Final = 5.0
"""A scraper's connection is closed after this time, with or without an answer."""
ROOM_S: Final = 0.2
"""How long to wait for the end of a closed connection; after that the new one is refused."""


class Handler(WSGIRequestHandler):
    """One request for the metrics."""

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes come every few seconds and are not logged."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._since_s: dict[socket.socket, float] = {}
        """When each connection began, the oldest first."""
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Bind without a reverse DNS lookup of this host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread of its own; close the oldest if MAX_CONNECTIONS are open."""
        if not self._places.acquire(blocking=False):
            self._cut_off(1, float("inf"))
            if not self._places.acquire(timeout=ROOM_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._since_s[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started now
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, then allow another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:  # so that no reused descriptor of a closed connection is closed
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections whose time is over; called several times a second."""
        self._cut_off(MAX_CONNECTIONS, time.monotonic() - CONNECTION_TIMEOUT_S)

    def _cut_off(self, n_most: int, before_s: float) -> None:
        """Close the oldest `n_most` connections made before a time; their threads end by that."""
        with self._lock:
            for one in [one for one, since_s in self._since_s.items() if since_s < before_s][:n_most]:
                del self._since_s[one]
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Scrapers that disconnect early are not logged either."""


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an empty host means this machine only. UserError for other texts."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"{text!r} is no address for metrics", "use HOST:PORT, e.g. 127.0.0.1:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


def make_server(collector: Collector, address: tuple[str, int]) -> WSGIServer:
    """A server that has not started yet; port 0 lets the system choose. UserError if the address cannot be bound."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server = _Server(address, Handler)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise UserError(f"metrics cannot be served at {where}: {error.strerror}", "choose another HOST:PORT") from error
    server.set_app(make_wsgi_app(registry))
    return server
