"""A second store for the messages, in rank 0's own process, since the job's may die while its ranks live.

torchrun keeps the job's store in its own process, so `kill -9` of torchrun takes it along and leaves the ranks. What
is written goes to the spare first. So once the job's store is gone, whatever any rank read from it is there.
"""

from __future__ import annotations

import resource
import secrets
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

CONNECT_TIMEOUT_S = 5.0
N_REACHED_KEY = "reached"
REQUEST_TIMEOUT = timedelta(seconds=10)
LARGEST_SHARE_OF_FILES = 0.5
"""Of the files that rank 0's process may open, for connections to the spare."""


def open_spare(job_store: dist.Store, world_size: int) -> tuple[dist.Store, str] | None:
    """Rank 0: a store in this process, and the address by which others reach it with `connect_spare`.

    None where the job's store is not on the network, or no other can be opened.
    """
    tcp = _tcp_store_below(job_store)
    n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if tcp is None or (n_files != resource.RLIM_INFINITY and world_size > LARGEST_SHARE_OF_FILES * n_files):
        return None
    try:
        with socket.create_connection((tcp.host, tcp.port), CONNECT_TIMEOUT_S) as probe:
            own = probe.getsockname()[0].removeprefix("::ffff:")
        is_loopback = own == "::1" or own.startswith("127.")
        is_local = tcp.host in ("localhost", own)
        # A host's own name may mean loopback to itself, and to others an interface.
        address = tcp.host if is_loopback else own
        listener = socket.create_server(
            ("" if is_loopback and not is_local else own, 0),
            family=socket.AF_INET6 if ":" in own else socket.AF_INET,
            backlog=min(world_size, socket.SOMAXCONN),
        )
        port = listener.getsockname()[1]
        server = dist.TCPStore(
            own, port, None, True, REQUEST_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except (OSError, RuntimeError):
        return None
    prefix = secrets.token_hex(8)  # another job may listen at a dead one's port
    return dist.PrefixStore(prefix, server), f"{port} {prefix} {address}"


def connect_spare(address: str) -> dist.Store | None:
    """Another rank's connection to rank 0's spare, counted there; None where it cannot be reached."""
    try:
        port, prefix, host = address.split()
        if not is_reachable(host, int(port)):
            return None
        client = dist.TCPStore(host, int(port), None, False, REQUEST_TIMEOUT, wait_for_workers=False)
        spare = dist.PrefixStore(prefix, client)
        spare.add(N_REACHED_KEY, 1)
    except (ValueError, OSError, RuntimeError):
        return None
    return spare


def may_live(store: dist.Store) -> bool:
    """Whether somebody listens where `store` is served; a client of torch's would try for its whole timeout."""
    tcp = _tcp_store_below(store)
    return tcp is None or is_reachable(tcp.host, tcp.port)


def is_reachable(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _tcp_store_below(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None
