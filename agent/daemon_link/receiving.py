"""Taking messages out of a ZeroMQ socket without keeping more than a message of ours may hold."""

from __future__ import annotations

from typing import Any

import zmq

from zerotune.store.wire import MAX_FRAMES


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
