"""Admits only requests to read that have the token and ask for a name of this host.

The token is behind the # of the printed address, which browsers send to nobody. The page keeps it for its own tab and
sends it with requests for data. A cookie would go to every port of this machine. A Host header that is neither an
address nor a name of this machine is refused: it comes from another site's page, whose name was made to point here
(DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_BYTES: Final = 24
IS_KNOWN: Final = "zerotune.is_known"
"""In the state of a request: whether it may see data, because it has the token or none is needed."""
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Access:
    """Filters requests to an application; without a token, none is needed.

    `public` are paths without data, which need no token. `names` are allowed host names beside this machine's and every
    IP address.
    """

    def __init__(self, app: ASGIApp, token: str, public: Collection[str], names: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        self._public = frozenset(public)
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._is_own_host(headers.get("host", "")):
            return PlainTextResponse("this host is not served here\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page can only be read\n", 405)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        is_known = not self._token or (scheme.lower() == "bearer" and self._is_token(bearer))
        scope.setdefault("state", {})[IS_KNOWN] = is_known
        if is_known or scope["path"] in self._public:
            return None
        return PlainTextResponse("open the address that `zerotune status --web` printed: it has the token\n", 403)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    def _is_own_host(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name, _, _ = name[1:].partition("]")
        elif name.count(":") == 1:
            name, _, _ = name.partition(":")
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
