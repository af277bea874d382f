from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens at now; another process may still take it first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
