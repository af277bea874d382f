"""Runs actions right before this process makes its first process group: only then is it known to be a rank.

Workers of data loaders and compilers, and torchrun's own process, import torch, too, but never make a group.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .reasons import Mark, remove_mark, write_mark

logger = logging.getLogger("zerotune.agent")


@dataclass(frozen=True)
class Group:
    """The default group as it was made; the script may have destroyed it since."""

    rank: int
    n_ranks: int
    backends: str
    """Its `get_backend_config`."""


_actions: list[Callable[[], None]] = []
_store_actions: list[Callable[[Any, int, int], None]] = []
_is_watched = False
_watched_by = 0
"""The process in which the agent was activated."""
_has_begun = False
_made: Group | None = None


def made() -> Group | None:
    """The first group that this process has made; None before that."""
    if _made is None and _is_watched and dist.is_initialized():
        _keep()
    return _made


def has_called() -> bool:
    """Whether collectives ran on the default group; False if its backend does not count them."""
    with contextlib.suppress(Exception):
        return bool(dist.is_initialized() and dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    return False


def _keep() -> None:
    global _made
    _made = Group(dist.get_rank(), dist.get_world_size(), str(dist.get_backend_config()))
    if os.getpid() != _watched_by:  # a forked process has no agent, and ends without a word
        return
    write_mark(Mark.group)
    if _made.rank == 0:
        remove_mark(Mark.rank_0)  # of a start before this one
        write_mark(Mark.rank_0, str(os.getpid()))


def before_first_group(action: Callable[[], None]) -> None:
    """Call `action` before the first process group is made; at once if its making has begun. It must not raise."""
    global _is_watched, _watched_by
    if not dist.is_available():
        return
    if _has_begun or dist.is_initialized():
        action()
        return
    _actions.append(action)
    if not _is_watched:
        _is_watched, _watched_by = True, os.getpid()
        _watch()


def before_communicators(action: Callable[[Any, int, int], None]) -> None:
    """Call `action` with the job's store, the rank and the number of ranks, before the first group is made of them."""
    if dist.is_available() and not dist.is_initialized():
        _store_actions.append(action)
        before_first_group(lambda: None)


def _run_with_store(store: Any, rank: int, world_size: int) -> None:
    while _store_actions:
        try:
            _store_actions.pop(0)(store, rank, world_size)
        except Exception as error:  # training must start whatever is wrong with zerotune
            logger.warning("zerotune: %s", error)


def _watch() -> None:
    from torch.distributed import distributed_c10d as c10d

    original, meet = c10d.init_process_group, c10d.rendezvous

    def rendezvous(*args: Any, **kwargs: Any) -> Any:
        for store, rank, world_size in meet(*args, **kwargs):
            _run_with_store(store, rank, world_size)
            yield store, rank, world_size

    c10d.rendezvous = rendezvous

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        _run_actions()
        if _store_actions and isinstance(kwargs.get("store"), dist.Store):
            _run_with_store(kwargs["store"], kwargs.get("rank", -1), kwargs.get("world_size", -1))
        result = original(*args, **kwargs)
        if _made is None:
            with contextlib.suppress(Exception):  # a group of an unknown kind
                _keep()
        return result

    # Other modules (device meshes) have imported the same function under a name of their own.
    for module in tuple(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("init_process_group") is original:
            module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _run_actions() -> None:
    global _has_begun
    _has_begun = True
    while _actions:
        try:
            _actions.pop(0)()
        except Exception as error:  # training must start whatever is wrong with zerotune
            logger.warning("zerotune: the agent is off, training runs untuned: %s", error)
