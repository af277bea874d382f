"""A name for one start of a group, so that its keys are not those of an earlier start.

torchrun's restarts share one store: a new rank may read keys of a dead rank before they are replaced. Launchers count
restarts differently on different nodes. So the group's first rank chooses a name and writes it with its process id.
Other ranks take a name only if its process lives. As in `zerotune.agent.agreement.job_start`, every rank of the old
start must be dead before the first rank of the new start begins.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import psutil
import torch.distributed as dist

from ..errors import EmulatedNcclError

STALE_NAME_S: Final = 30.0
"""How long the first rank of a restarted group may take to replace the name of its dead predecessor."""
POLL_S: Final = 0.01

n_started: Counter[tuple[object, ...]] = Counter()


def name_start(store: dist.Store, group: str, ranks: Sequence[int], rank: int, n_ranks: int, timeout: timedelta) -> str:
    """The name of this start of a group, 16 hexadecimal digits, the same on all its ranks.

    Args:
        group: the group's own name, which a process may use several times, also for other ranks.
        ranks: the group's global ranks; empty for the default group.
        timeout: how long other ranks wait for the first one.

    Raises:
        EmulatedNcclError: the first rank's process is not visible here.
    """
    # A process may destroy a group and make it again: then its first rank lives, and an earlier name of it may be read.
    # If the default group is made again, torch reuses names for groups of other ranks. A rank may not be a member of
    # all these groups. So starts are counted by store, name, ranks and size of the group.
    this = (*_place(store), group, *ranks, n_ranks)
    key = f"emulated_nccl/start/{'.'.join(map(str, ranks))}/{n_ranks}/{n_started[this]}"
    n_started[this] += 1
    if rank == 0:
        name = secrets.token_hex(8)
        store.set(key, f"{name} {os.getpid()} {psutil.Process().create_time()}")
        return name
    store.wait([key], timeout)
    deadline_s = time.monotonic() + STALE_NAME_S
    while True:
        name, pid, began_s = store.get(key).decode().split()
        if is_alive(int(pid), float(began_s)):
            return name
        if time.monotonic() > deadline_s:
            raise EmulatedNcclError(
                f"rank {rank} does not see rank 0's process {pid}: all ranks of the emulated NCCL must run on one "
                "machine and in one container"
            )
        time.sleep(POLL_S)


def _place(store: Any) -> tuple[object, ...]:
    """Identifies a store by its place."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return tuple(getattr(store, name, None) for name in ("host", "port", "path"))


def is_alive(pid: int, began_s: float) -> bool:
    """Whether the process that had this number at that time (seconds since 1970) still runs."""
    try:
        process = psutil.Process(pid)
        # Another process may have reused the pid. The tolerance is for small corrections of the system clock.
        is_same = abs(float(process.create_time()) - began_s) < 1.0
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
