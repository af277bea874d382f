"""Taking messages out of a ZeroMQ socket without keeping more than a message of ours may hold, nor telling of each."""

from __future__ import annotations

from typing import Any, Final

import zmq

from ...store.wire import MAX_FRAMES

TOLD_FIRST: Final = 3


def receive_frames(socket: zmq.Socket[Any], n_addresses: int = 0) -> list[bytes]:
    """The next message, never waiting; of one with more frames than the protocol has, one frame too many is told.

    Args:
        socket: ZeroMQ hands a message over only when all its frames have arrived.
        n_addresses: frames that the socket itself puts in front; 1 for a ROUTER.

    Returns:
        Its frames. Of a message with too many, those of the protocol are empty and there is one too many: nothing of
        it is kept, and decoding refuses it.

    Raises:
        zmq.Again: none is there.
        MemoryError: there is no room for it; it is thrown away.
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


def is_told(number: int) -> bool:
    """Whether the message of this number among many alike, from 1 on, gets a line in the log.

    The first ones do, then each doubling of their number: whoever sends what makes no sense must not fill a disk.
    """
    return number <= TOLD_FIRST or number & (number - 1) == 0
