"""The socket at which users request their daemon: a connection is the whole request.

The kernel reports who connects (SO_PEERCRED), so nothing is read. The answer is a line of JSON with the endpoint, at
once; the connection ends when a daemon serves there. If none can, a second line has the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket as sockets
from pathlib import Path
from typing import Final

from ...store.errors import UserError
from ...store.foreign.peer import peer_of
from ...store.lockfile import LockFile, LockHeld
from ...store.paths import SERVICE_DOOR

BACKLOG: Final = 4096


class Visitor:
    """One connection of a user who waits for their daemon."""

    def __init__(self, connection: sockets.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        _, self.uid, self.gid = peer_of(connection)

    def send(self, **words: str) -> None:
        """Send a line; it is lost if the visitor has left or does not read."""
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps(words).encode() + b"\n")

    def fileno(self) -> int:
        """A descriptor; it is readable once the visitor has left or, unexpectedly, has sent something."""
        return self._connection.fileno()

    def leave(self) -> None:
        """End the connection."""
        self._connection.close()


class Door:
    """Listens at construction.

    Args:
        group: gid of the group whose members may connect; None: all users may.

    Raises:
        UserError: another service is there, or the socket cannot be made.
    """

    def __init__(self, folder: Path, group: int | None) -> None:
        self._path = folder / SERVICE_DOOR
        try:
            self._lock = LockFile(folder / f"{SERVICE_DOOR}.lock")
        except LockHeld as held:
            raise UserError(f"a service runs already: `{held.command}` (pid {held.pid})", "stop it") from held
        except OSError as error:
            raise UserError(f"folder {folder} cannot be written: {error.strerror}", "run this as root") from error
        self._path.unlink(missing_ok=True)
        self._socket = sockets.socket(sockets.AF_UNIX)
        self._socket.setblocking(False)
        umask = os.umask(0o177)
        try:
            self._socket.bind(str(self._path))
        finally:
            os.umask(umask)
        if group is not None:
            os.chown(self._path, -1, group)
        self._path.chmod(0o666 if group is None else 0o660)
        self._socket.listen(BACKLOG)

    def fileno(self) -> int:
        """A descriptor; it is readable once somebody connects."""
        return self._socket.fileno()

    def visitor(self) -> Visitor | None:
        """The next visitor; None: nobody waits. OSError: the connection cannot be accepted."""
        try:
            return Visitor(self._socket.accept()[0])
        except (BlockingIOError, ConnectionError):
            return None

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()
        with contextlib.suppress(OSError):  # the file system may be read-only now
            self._path.unlink(missing_ok=True)
        self._lock.release()
