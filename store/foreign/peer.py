"""The process at the other end of a Unix socket, as the kernel reports it."""

from __future__ import annotations

import socket as sockets
import struct
from typing import Final, NamedTuple

_UCRED: Final = struct.Struct("iII")
"""Numbers of users and groups use all 32 bits: directory services assign numbers from 2^31 on, for example."""


class Peer(NamedTuple):
    """A process, and the user that it ran as when it connected or began to listen."""

    pid: int
    """0: the process is in another container."""
    uid: int
    gid: int


def peer_of(connected: sockets.socket) -> Peer:
    """The process at the other end of a connected socket."""
    return Peer._make(_UCRED.unpack(connected.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _UCRED.size)))
