"""Single requests to a daemon: its status, and the announcement of a start."""

from __future__ import annotations

import contextlib
from pathlib import Path

import zmq

from ...store import wire
from ...store.errors import UserError, WireError
from .connection import Connection, new_context


def fetch_status(endpoint: str, timeout_s: float = 2.0, *, curve_dir: Path | None = None) -> wire.StatusReply | None:
    """The state of the daemon at `endpoint`; None if no answer comes in time or it cannot be decoded.

    Args:
        curve_dir: folder with the keys for `tcp://`; None: ZEROTUNE_CURVE_KEYS names it.

    Raises:
        UntrustedError: another user's daemon listens there, or could.
        UserError: the endpoint needs keys, and the folder lacks one; or too few files can be opened.
    """
    reply = _ask(endpoint, wire.StatusRequest(), timeout_s, curve_dir)
    return reply if isinstance(reply, wire.StatusReply) else None


def announce(endpoint: str, start: wire.Start, timeout_s: float = 2.0) -> bool:
    """Announce a start to the daemon at `endpoint`; returns whether it has confirmed that. Never raises."""
    with contextlib.suppress(UserError):
        return isinstance(_ask(endpoint, start, timeout_s, None), wire.Welcome)
    return False


def _ask(
    endpoint: str, question: wire.AgentMessage, timeout_s: float, curve_dir: Path | None
) -> wire.DaemonMessage | None:
    closing = contextlib.closing(Connection(endpoint, curve_dir))
    with closing as connection, new_context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        try:
            if not connection.connect(socket):
                return None
            socket.send_multipart(wire.encode(question))
            if not socket.poll(int(timeout_s * 1000)):
                return None
            return wire.decode_daemon(socket.recv_multipart())
        except (zmq.ZMQError, WireError):
            return None
