"""What an endpoint must look like, for those who serve one and those who connect."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Final

from zerotune.store.errors import UserError

MAX_IPC_PATH_BYTES: Final = 107
"""Longest path of a Unix domain socket on Linux."""
MAX_SOCKET_NAME_BYTES: Final = MAX_IPC_PATH_BYTES - len("/proc/self/fd/1048576/")
"""Clients reach it through the folder that they have opened and checked."""
MAX_PORT: Final = 65_535
_TCP_REMEDY: Final = "write tcp://HOST:PORT"
ENDPOINT_REMEDY: Final = "give another with --endpoint or ZEROTUNE_ENDPOINT"


def check_endpoint(endpoint: str) -> None:
    """See that a daemon could ever be at `endpoint`.

    Raises:
        UserError: it is no ipc:// or tcp:// address, its socket has a path that is too long or none at all, or there
            is no such port.
    """
    scheme, _, place = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not place:
        raise UserError(f"endpoint {endpoint!r} is neither ipc:// nor tcp://", ENDPOINT_REMEDY)
    if scheme == "ipc" and len(os.fsencode(place)) > MAX_IPC_PATH_BYTES:
        raise UserError(
            f"socket path {place} is longer than {MAX_IPC_PATH_BYTES} bytes",
            "give another with ZEROTUNE_RUNTIME_DIR, --endpoint or ZEROTUNE_ENDPOINT",
        )
    port = place.rpartition(":")[2]
    if scheme == "ipc" and len(os.fsencode(PurePath(place).name)) > MAX_SOCKET_NAME_BYTES:
        raise UserError(f"socket name {place} is longer than {MAX_SOCKET_NAME_BYTES} bytes", ENDPOINT_REMEDY)
    if scheme == "ipc" and place.startswith("@"):
        raise UserError(f"endpoint {endpoint} is an abstract socket, which anyone may connect to", ENDPOINT_REMEDY)
    if scheme == "tcp" and not (port == "*" or (port.isascii() and port.isdigit() and int(port) <= MAX_PORT)):
        raise UserError(f"endpoint {endpoint} has no possible port: {port!r} is none of 0 to {MAX_PORT}", _TCP_REMEDY)
