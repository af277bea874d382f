"""A name for one start of a group, under which nothing of an earlier start is found.

torchrun's restarts share one store, and a new rank may read what a dead one has left there before its successor
replaces it; how often the job was restarted, launchers tell differently on different nodes. So the group's first rank
makes up a name and says which process it is, and the others take the name of a process that lives. As in
`zerotune.agent.agreement.job_start`, every rank of the old start must be dead before the first of the new one lives.
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
    """The name of this start of a group, the same on all its ranks.

    Args:
        store: shared by the group's ranks, also with starts before this one.
        group: the group's own name; it may be made several times in a process, also of other ranks.
        ranks: of the group, in the job; none for the default group.
        rank: of this process in the group; 0 makes up the name.
        timeout: how long the others wait for rank 0.

    Returns:
        16 hexadecimal digits.

    Raises:
        EmulatedNcclError: the first rank's process cannot be seen from here.
    """
    # A process may destroy a group and make it again: then its first rank lives, and has said something before. Once
    # the default group is made again, too, torch gives its names to groups of other ranks. A rank may have had no part
    # in some of these starts: what it must have in common with the others is the store, and how large the group is.
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
        if lives(int(pid), float(began_s)):
            return name
        if time.monotonic() > deadline_s:
            raise EmulatedNcclError(
                f"rank {rank} does not see rank 0's process {pid}: all ranks of the emulated NCCL must run on one "
                "machine and in one container"
            )
        time.sleep(POLL_S)


def _place(store: Any) -> tuple[object, ...]:
    """Where a store is, which the same one has in common with itself."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return tuple(getattr(store, name, None) for name in ("host", "port", "path"))


def lives(pid: int, began_s: float) -> bool:
    """Whether the process that had this number at that time (seconds since 1970) still runs."""
    try:
        process = psutil.Process(pid)
        # Another process may have got the pid since; the system clock behind these times may be set back by less than
        # this.
        is_same = abs(float(process.create_time()) - began_s) < 1.0
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
