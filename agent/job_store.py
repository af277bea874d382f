"""The job's c10d store, on a connection of the agent's own.

A blocking read on the store's shared connection would delay its other users in the process: new process groups and
elastic agents. So the agent opens another connection.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

PREFIX = "zerotune"
TIMEOUT = timedelta(minutes=30)


def open_job_store(store: dist.Store | None = None) -> dist.Store:
    """A connection to `store`, by default the default process group's, below the agent's prefix.

    Keys of an earlier start of the job are still there, see `zerotune.agent.agreement.job_start`.

    Raises:
        RuntimeError: there is no default process group, or the store cannot be opened twice.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.PrefixStore(PREFIX, second_connection(store if store is not None else _get_default_store()))


def second_connection(store: Any) -> Any:
    """A connection to `store` that nobody else blocks; raises `RuntimeError` if the store cannot be opened twice."""
    if hasattr(store, "clone"):
        return store.clone()
    # Older torch: PrefixStore hides its prefix, so the agent's keys go to the root.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    if isinstance(store, dist.HashStore):
        return store  # it serves one process only: nobody else blocks in it
    raise RuntimeError(f"the job's store is a {type(store).__name__}, which cannot be opened a second time")
