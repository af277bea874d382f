"""`zerotune status --web`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ....store.errors import UserError


def serve_page(endpoint: str, curve_keys: Path | None, listen: str, token: bool, host_names: Sequence[str]) -> None:
    """Serve a page of a daemon's jobs until interrupted; browsers may use further `host_names`.

    With `token`, the printed address has a secret token, and the page is served only with it.

    Raises:
        UserError: packages are missing, or the page cannot be served at `listen`.
    """
    host, port = _parsed(listen)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the status page needs {error.name}, which is not installed",
            "pip install 'zerotune[dashboard]', or '.[dashboard]' where its sources are",
        ) from None
    from ...watching.watcher import Watcher
    from ...watching.web.access import is_loopback, new_token
    from ...watching.web.serving import bound, serve

    if not token and not is_loopback(host):
        raise UserError(
            f"--no-token at {host} would show the jobs to whoever reaches this machine",
            f"leave it out, or use --listen 127.0.0.1:{port}",
        )
    secret = new_token() if token else ""
    with bound(host, port) as listening:
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{listening.getsockname()[1]}/"

        def announce() -> None:
            print(f"status page at {url}{f'#{secret}' if token else ''}", flush=True)
            if not token:
                print("zerotune: every user of this machine can read it", file=sys.stderr)
            elif not is_loopback(host):
                print("zerotune: HTTP is not encrypted: on networks of others, use `ssh -L` instead", file=sys.stderr)

        serve(Watcher(endpoint, curve_keys), listening, secret, [*host_names, host], announce)


def _parsed(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"--listen {listen} is no address for a page", "use HOST:PORT, e.g. 127.0.0.1:8470")
    return host.strip("[]") or "127.0.0.1", int(port)
