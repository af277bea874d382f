"""Stands between a client and a daemon at `tcp://`: keeps the frames that the client sends, and may send them again."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Final

GREETING_BYTES: Final = 64
SIGNATURE_BYTES: Final = 10
"""The begin of the greeting: each side waits for the other's."""
_IS_LONG: Final = 2
"""Flag of a frame whose size has 8 bytes instead of one."""
ANSWER_S: Final = 0.3
"""Not every frame is answered."""


class WireTap:
    """Serves one connection after the other from construction to `close`, and passes on each ZMTP frame unchanged."""

    def __init__(self, port: int) -> None:
        self._place = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.sent: list[list[bytes]] = []
        """By connection: the greeting, then each frame."""
        self._held: list[bytes] | None = None
        self._daemon: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="wire-tap", daemon=True)
        self._thread.start()

    def hold(self) -> None:
        self._held = []

    def release(self, *order: int) -> None:
        held, self._held = self._held or [], None
        self.say(*(held[at] for at in order))

    @property
    def n_held(self) -> int:
        return len(self._held or ())

    def say(self, *frames: bytes) -> None:
        """Send frames to the daemon, as if the client had."""
        assert self._daemon is not None
        with contextlib.suppress(OSError):  # it has ended the connection
            self._daemon.sendall(b"".join(frames))

    def say_anew(self, greeting: bytes, *frames: bytes) -> None:
        """Replay a connection's begin over a new connection, each frame after the daemon's answer."""
        parts = [greeting[:SIGNATURE_BYTES], greeting[SIGNATURE_BYTES:], *frames]
        with socket.create_connection(self._place, timeout=ANSWER_S) as daemon, contextlib.suppress(OSError):
            for part in parts:
                daemon.sendall(part)
                with contextlib.suppress(TimeoutError):
                    daemon.recv(65_536)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                with client, socket.create_connection(self._place) as self._daemon:
                    back = threading.Thread(target=_pass_on, args=(self._daemon, client), daemon=True)
                    back.start()
                    with contextlib.suppress(OSError):
                        self._listen_to(client, self._daemon)
                    for one in (client, self._daemon):
                        with contextlib.suppress(OSError):
                            one.shutdown(socket.SHUT_RDWR)
                    back.join()

    def _listen_to(self, client: socket.socket, daemon: socket.socket) -> None:
        self.sent.append(frames := [])
        with client.makefile("rb") as reading:
            frames.append(b"")
            while len(frames[0]) < GREETING_BYTES:  # each half of it waits for one of the other side's
                if not (part := reading.read1(GREETING_BYTES - len(frames[0]))):
                    return
                frames[0] += part
                daemon.sendall(part)
            while head := reading.read(1):
                size = reading.read(8 if head[0] & _IS_LONG else 1)
                frames.append(head + size + reading.read(int.from_bytes(size, "big")))
                if self._held is None:
                    daemon.sendall(frames[-1])
                else:
                    self._held.append(frames[-1])


def _pass_on(daemon: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := daemon.recv(65_536):
            client.sendall(part)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
