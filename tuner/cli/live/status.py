"""`zerotune status`."""

from __future__ import annotations

from typing import Final

from zerotune.store.errors import UserError
from zerotune.tuner.cli.options import AsJson, CurveKeys, Endpoint, console, print_json
from zerotune.tuner.cli.paths import endpoint_or_default

PATIENCE_S: Final = 8.0
"""Time for a daemon that is there, but busy, to answer."""


def status(endpoint: Endpoint = None, curve_keys: CurveKeys = None, as_json: AsJson = False) -> None:
    """Show the daemon's jobs, ranks, rates, epochs, last decisions and health.

    Example: zerotune status
    """
    from zerotune.tuner.client.status import fetch_status, holder_of, no_answer

    where = endpoint_or_default(endpoint)
    reply = fetch_status(where, timeout_s=2.0, curve_dir=curve_keys)
    if reply is None and (holder := holder_of(where)) is not None:
        reply = fetch_status(where, timeout_s=PATIENCE_S, curve_dir=curve_keys)
        if reply is None:
            raise no_answer(where, holder)
    if reply is None:
        raise UserError(f"no daemon answers at {where}", "start one with `zerotune daemon`")
    if as_json:
        print_json(reply)
        return
    from zerotune.tuner.client.status import render_status

    render_status(reply, console())
