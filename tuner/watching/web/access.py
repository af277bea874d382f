"""Who may see the page: whoever knows the token, asks for a host of ours, and only reads.

The token stands in the URL that is printed; the page exchanges it for a cookie, so that it stays in no history and no
header of other sites. A Host header that is neither an address nor a name of ours comes from a page of others, whose
name was made to point here (DNS rebinding), and is refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_BYTES: Final = 24
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
    """Whether only this machine reaches what is bound to `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Access:
    """Stands before an application and lets in who may.

    Args:
        app: what is behind it.
        token: without which nobody is served; empty: everybody is.
        names: further names that the page may be asked for by, beside this machine's and every IP address.
    """

    def __init__(self, app: ASGIApp, token: str, names: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
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
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        if not self._is_ours(headers.get("host", "")):
            return PlainTextResponse("this host is not served here\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page can only be read\n", 405)
        if not self._token:
            return None
        cookie = f"zerotune_{(scope['server'] or ('', 0))[1]}"  # ports of one host share cookies
        if self._is_token(query.get("token", "")):
            moved = RedirectResponse("/", 303)
            moved.set_cookie(cookie, self._token, httponly=True, samesite="lax", path="/")
            return moved
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        kept = cookie_parser(headers.get("cookie", "")).get(cookie, "")
        if self._is_token(kept) or (scheme.lower() == "bearer" and self._is_token(bearer)):
            return None
        return PlainTextResponse("open the address that `zerotune dashboard` printed: it has the token\n", 403)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    def _is_ours(self, host: str) -> bool:
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
