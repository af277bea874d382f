"""`torch.distributed.shrink_group` on emulated groups.

Torch asks a group's backend for a smaller backend, and puts that into a plain group, whose collectives do not call
Python. An emulated group is a group and its backend in one, so the result of the backend is used as the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_MAKER: Final = "_create_shrunk_process_group"
"""Torch's function that makes a group of the smaller backend; torch before 2.9 cannot shrink groups."""


class InnerGloo(dist.ProcessGroupGloo):
    """The gloo backend of an emulated group."""

    supports_shrinking = True

    def __init__(self, owner: Any, store: dist.Store, rank: int, n_ranks: int, timeout: timedelta) -> None:
        super().__init__(store, rank, n_ranks, timeout=timeout)
        self._owner = owner

    def shrink(self, excluded: Sequence[int], flags: int = 0, _options: Any = None) -> Any:
        """The emulated group without some ranks."""
        return self._owner.shrink(excluded, aborted=flags == c10d.SHRINK_ABORT)


def keep_shrunk_groups(kind: type) -> None:
    """From now on a shrunk group of this kind is used directly."""
    original = getattr(c10d, _MAKER, None)
    if original is None:
        return

    def make_group(shrunk: Any, ranks: list[int], metadata: dict[str, Any], is_default: bool) -> Any:
        if not isinstance(shrunk, kind):
            return original(shrunk, ranks, metadata, is_default)
        group: Any = shrunk
        group._set_group_name(metadata["new_group_name"])
        group._set_group_desc("default:shrunken" if is_default else f"{metadata['original_group_name']}:shrunk")
        return group

    setattr(c10d, _MAKER, make_group)
