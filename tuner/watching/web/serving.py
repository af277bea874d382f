"""The status page's application and its server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection
from importlib import resources
from typing import Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from ....store.errors import UserError
from ..watcher import Watcher
from .access import Access
from .feed import Feed
from .patience import Connection

FILES: Final = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def application(feed: Feed, token: str, names: Collection[str] = ()) -> ASGIApp:
    """The application with the page, its parts and its events; its arguments are those of `Access`."""

    async def events(asked: Request) -> Response:
        if asked.method == "HEAD":
            return Response(media_type="text/event-stream")
        if feed.is_full:
            return PlainTextResponse("too many pages are open\n", 503)
        return StreamingResponse(feed.events(), media_type="text/event-stream")

    async def snapshot(_: Request) -> Response:
        return Response(msgspec.json.encode(await feed.latest()), media_type="application/json")

    routes = [Route(path, _file(*file)) for path, file in FILES.items()]
    routes += [Route("/events", events), Route("/snapshot.json", snapshot)]
    return Access(Starlette(routes=routes), token, FILES, names)


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; UserError if the address cannot be bound."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UserError(
            f"the status page cannot be served at {host}:{port}: {error.strerror}", "choose another --listen HOST:PORT"
        ) from error


def serve(
    watcher: Watcher, listening: socket.socket, token: str, names: Collection[str], announce: Callable[[], None]
) -> None:
    """Serve until SIGINT or SIGTERM, and close the listening socket at the end."""
    feed = Feed(watcher)
    config = uvicorn.Config(
        application(feed, token, names),
        http=Connection, ws="none", loop="asyncio", lifespan="off", log_level="critical", access_log=False,
        server_header=False, timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=1 << 14,
    )  # fmt: skip
    announce()  # earlier connections wait in the socket's queue
    with listening, contextlib.closing(feed), contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])


def _file(name: str, media_type: str) -> Callable[[Request], Response]:
    content = resources.files("zerotune.tuner.watching.web").joinpath(name).read_bytes()

    def answer(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer
