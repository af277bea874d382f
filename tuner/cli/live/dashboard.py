"""`zerotune dashboard`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ....store.errors import UserError
from ..options import CurveKeys, Endpoint
from ..paths import endpoint_or_default

LISTEN = "127.0.0.1:8470"


def dashboard(
    endpoint: Endpoint = None,
    listen: Annotated[str, typer.Option(help="Serve at HOST:PORT; port 0 is a free one.")] = LISTEN,
    token: Annotated[
        bool,
        typer.Option(help="Serve only those who know the printed address; without, only at this machine's own."),
    ] = True,
    host_name: Annotated[
        list[str] | None,
        typer.Option(help="A further name that browsers may ask for it by; may be given several times."),
    ] = None,
    curve_keys: CurveKeys = None,
) -> None:
    """Serve a live, read-only page of the daemon's jobs, until interrupted.

    Example: zerotune dashboard
    """
    where = endpoint_or_default(endpoint)
    host, port = _parsed(listen)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the dashboard needs {error.name}, which is not installed",
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
            print(f"dashboard at {url}{f'#{secret}' if token else ''}", flush=True)
            if not token:
                print("zerotune: every user of this machine can read it", file=sys.stderr)
            elif not is_loopback(host):
                print("zerotune: HTTP is not encrypted: on networks of others, use `ssh -L` instead", file=sys.stderr)

        serve(Watcher(where, curve_keys), listening, secret, [*(host_name or ()), host], announce)


def _parsed(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"--listen {listen} is no address for a page", f"use HOST:PORT, e.g. {LISTEN}")
    return host.strip("[]") or "127.0.0.1", int(port)
