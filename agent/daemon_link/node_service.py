"""Asks the node's service, `zerotune daemon --all-users`, for this user's daemon."""

from __future__ import annotations

import os
import socket as sockets
import stat
import struct
import time
from pathlib import Path
from typing import Final

import msgspec

from ...store.errors import UntrustedError
from ...store.foreign.peer import peer_of
from ...store.paths import SERVICE_DOOR, SERVICE_RUNTIME_DIR
from ...store.private_folders import open_socket_folder
from ..settings import ENV_ENDPOINT

ADDRESS_TIMEOUT_S: Final = 0.5
"""The service sends the address at once, whether or not a daemon serves there already."""
_TIMEVAL: Final = struct.Struct("@ll")
MAX_ANSWER_BYTES: Final = 65_536
"""Two addresses take less than 300 bytes; a peer that sends more is not the service."""


class Answer(msgspec.Struct, frozen=True):
    """The service's answer."""

    endpoint: str = ""
    problem: str = ""
    """Why no daemon serves there; empty: one does, or will soon."""
    remedy: str = ""


def has_service() -> bool:
    """Whether this node has a service for `request_daemon`; does not connect, so no daemon is started."""
    if _names_another_place():
        return False
    try:
        found = os.stat(Path(SERVICE_RUNTIME_DIR) / SERVICE_DOOR)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid in (0, os.getuid())


def _names_another_place() -> bool:
    return bool(os.environ.get(ENV_ENDPOINT) or os.environ.get("ZEROTUNE_RUNTIME_DIR"))


def request_daemon(wait_s: float) -> Answer | None:
    """Ask for a daemon. The service also creates the folder of its socket, where `default_endpoint` finds it.

    This waits at most `wait_s` until the daemon serves, or the service answers that it cannot. None: the user has named
    another place, or no service of root's serves this user here.
    """
    if _names_another_place():
        return None
    folder = Path(SERVICE_RUNTIME_DIR)
    try:
        os.close(open_socket_folder(folder))
        with sockets.socket(sockets.AF_UNIX) as door:
            # SO_SNDTIMEO and not `settimeout`: a non-blocking connect fails at once if the backlog is full.
            door.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDTIMEO, _TIMEVAL.pack(0, int(ADDRESS_TIMEOUT_S * 1e6)))
            door.connect(str(folder / SERVICE_DOOR))
            if peer_of(door).uid not in (0, os.getuid()):
                return None
            return _listen(door, wait_s)
    except (OSError, UntrustedError):
        return None


def _listen(door: sockets.socket, wait_s: float) -> Answer | None:
    received = b""
    ends_at_s = time.monotonic() + ADDRESS_TIMEOUT_S
    try:
        while len(received) < MAX_ANSWER_BYTES:
            had_line = b"\n" in received
            door.settimeout(max(0.001, ends_at_s - time.monotonic()))
            if not (part := door.recv(4096)):
                break
            received += part
            if b"\n" in received and not had_line:
                ends_at_s = time.monotonic() + wait_s
                if wait_s <= 0.0:
                    break
    except TimeoutError:
        pass
    fields: dict[str, str] = {}
    for line in received.splitlines():
        try:
            fields |= msgspec.json.decode(line, type=dict[str, str])
        except msgspec.DecodeError:
            break  # a line cut short, or not the service
    try:
        return msgspec.convert(fields, Answer) if fields else None
    except msgspec.ValidationError:
        return None
