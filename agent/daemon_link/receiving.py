"""Receives messages of bounded size from a ZeroMQ socket, and bounds the log lines about malformed ones."""

from __future__ import annotations

from typing import Any, Final

import zmq

from ...store.wire import MAX_FRAMES

LOGGED_FIRST: Final = 3


def receive_frames(socket: zmq.Socket[Any], n_addresses: int = 0) -> list[bytes]:
    """The next message; never waits, since ZeroMQ delivers a message only when all its frames have arrived.

    A message with too many frames is not kept: empty frames, one too many, replace it, so that decoding refuses it.

    Args:
        n_addresses: address frames that the socket itself puts in front; 1 for a ROUTER.

    Raises:
        zmq.Again: there is no message.
        MemoryError: the message does not fit into memory and is discarded.
    """
    most = n_addresses + MAX_FRAMES
    frames: list[bytes] = []
    n_frames = 0
    try:
        while True:
            if n_frames < most:
                frames.append(socket.recv(zmq.NOBLOCK))
            else:
                socket.recv(zmq.NOBLOCK, copy=False)
            n_frames += 1
            if not socket.getsockopt(zmq.RCVMORE):
                break
            if n_frames == most:
                del frames[n_addresses:]
    except MemoryError:
        frames.clear()
        while socket.getsockopt(zmq.RCVMORE):
            socket.recv(zmq.NOBLOCK, copy=False)
        raise
    if n_frames > most:
        frames += [b""] * (MAX_FRAMES + 1)
    return frames


def is_logged(number: int) -> bool:
    """Whether the `number`-th (from 1) of many similar messages gets a log line.

    The first ones do, and then each doubling of their number, so that a broken peer cannot fill a disk.
    """
    return number <= LOGGED_FIRST or number & (number - 1) == 0
