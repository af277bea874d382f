"""Process groups of the same ranks with other communicator configs, for gathers to run on.

They are created once training has filled its memory, and only if enough of it is left. How much memory a communicator
takes is known after its creation. Every decision follows from a maximum over the ranks, so all create the same groups.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ..checks import VARIANT_FIELDS
from .measures import UNLIMITED_BYTES, left_bytes_of
from .search import Judged

logger = logging.getLogger("zerotune.variants")

READY_AFTER: Final = 8
"""Steps after which memory is as full as it gets."""
RESERVE_BYTES: Final = 1 << 30
"""Device memory that must stay free beside a variant's communicator; twice as much before it is created."""


def log_on_rank_0(level: int, message: str, *values: object) -> None:
    """Rank 0 logs a line."""
    if dist.get_rank() == 0:
        logger.log(level, "zerotune: " + message, *values)


def why_not(group: dist.ProcessGroup) -> str:
    """Why gathers of `group` must stay on it; empty: they may run on another one."""
    if "nccl" not in str(dist.get_backend_config(group)):
        return "it does not run on NCCL"
    if group.size() == 1:
        return "it has one rank"
    if group.size() != dist.get_world_size():
        return "it does not have all ranks of the job"
    return ""


def reason(error: Exception) -> str:
    """An error as one line; NCCL's own words come last."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def shown(config: Mapping[str, int]) -> str:
    """A variant in words."""
    return " ".join(f"{name}={value}" for name, value in config.items())


class Variants:
    """The variants of one process group.

    Args:
        usual: the group, with all ranks of the job.
        wanted: fields in which each variant's config differs from the usual one; numbered from 1.
        maximum: a collective that returns the maximum over all ranks of each number.
    """

    def __init__(
        self,
        usual: dist.ProcessGroup,
        device: torch.device,
        wanted: Sequence[Mapping[str, int]],
        maximum: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self.groups: dict[int, dist.ProcessGroup] = {0: usual}
        """Existing groups by number; 0 is the usual one."""
        self._usual, self._device, self._wanted, self._maximum = usual, device, wanted, maximum
        self._left_bytes = left_bytes_of(usual, device)
        self._reported: Judged | None = None

    def make(self) -> tuple[int, ...]:
        """Create the groups that fit into memory; returns the numbers of all existing groups.

        All ranks call it while no call is under way.
        """
        for number, config in enumerate(self._wanted, 1):
            if why := self._try_to_make(number, config):
                log_on_rank_0(logging.WARNING, "gathers do not try %s: %s", shown(config), why)
        return tuple(self.groups)

    def _try_to_make(self, number: int, config: Mapping[str, int]) -> str:
        """Create one group, or return the reason why it is missing."""
        name = shown(config)
        options, why = self._options(config)
        why, before_bytes = self._agreed(why)
        if not why and before_bytes < 2 * RESERVE_BYTES:
            why = f"a rank has {before_bytes / 1e9:.1f} GB of device memory left, and it is not made"
        if why:
            return why
        why = self._connect(number, options, name)
        why, left_bytes = self._agreed(why)
        if not why and left_bytes < RESERVE_BYTES:
            why = f"a rank has {left_bytes / 1e9:.1f} GB of device memory left, so it is destroyed again"
        if not why:
            taken_mb = max(0, before_bytes - left_bytes) / 1e6
            text = "the communicator with %s took %.0f MB of device memory on the fullest rank"
            log_on_rank_0(logging.INFO, text, name, taken_mb)
        elif number in self.groups:
            dist.destroy_process_group(self.groups.pop(number))
        return why

    def _connect(self, number: int, options: Any, name: str) -> str:
        """Create a process group and its communicator, or return the reason why there is none."""
        try:
            made: dist.ProcessGroup = dist.new_group(
                backend="nccl", timeout=options._timeout, pg_options=options, group_desc=f"zerotune {name}"
            )
            mine = torch.zeros(1, device=self._device)
            dist.all_gather([torch.empty_like(mine) for _ in range(made.size())], mine, group=made)
        except Exception as error:
            return reason(error)
        self.groups[number] = made
        return ""

    def _agreed(self, why: str) -> tuple[str, int]:
        """Why a rank cannot go on (empty: all can), and the device memory (bytes) left on the fullest rank.

        Both are equal on all ranks. `why` is the reason why this rank cannot; empty: it can.
        """
        left_bytes = 0
        try:
            left_bytes = self._left_bytes()
        except Exception as error:
            why = why or reason(error)
        is_lacking, fullest = self._maximum([int(bool(why)), UNLIMITED_BYTES - left_bytes])
        return (why or "another rank cannot") if is_lacking else "", UNLIMITED_BYTES - fullest

    def _options(self, config: Mapping[str, int]) -> tuple[Any, str]:
        """The usual group's options, changed, and why they cannot be changed; empty: they can."""
        try:
            return self._changed_options(config)
        except Exception as error:
            return None, reason(error)

    def _changed_options(self, config: Mapping[str, int]) -> tuple[Any, str]:
        own = getattr(self._usual, "options", None)  # an emulated group's
        usual: Any = self._usual._get_backend(self._device).options if own is None else own
        options = type(usual)()
        options._timeout = usual._timeout
        options.is_high_priority_stream = usual.is_high_priority_stream
        known = [name for name in VARIANT_FIELDS if hasattr(options.config, name)]
        for name in known:
            setattr(options.config, name, config.get(name, getattr(usual.config, name)))
        unknown = [name for name in config if name not in known]
        if unknown:
            return options, f"NCCL's config has no {', '.join(unknown)} in this torch build, only {', '.join(known)}"
        return options, ""

    def keep(self, number: int) -> tuple[int, ...]:
        """Destroy all groups except the usual one and `number`; returns the numbers of the remaining groups.

        No call may be under way on the destroyed ones.
        """
        for other in [one for one in self.groups if one not in (0, number)]:
            dist.destroy_process_group(self.groups.pop(other))
        return tuple(self.groups)

    def report(self, judged: Judged | None) -> None:
        """Log the result of a variant's trial, once."""
        if judged is None or judged is self._reported:
            return
        self._reported = judged
        if judged.tried.variant == judged.against.variant:
            return
        tried, against = (
            shown(self._wanted[one.variant - 1]) if one.variant else "the usual config"
            for one in (judged.tried, judged.against)
        )
        percent, doubt = 100 * -math.expm1(judged.difference), 100 * judged.doubt
        if judged.is_faster:
            log_on_rank_0(logging.INFO, "gathers use %s: steps %.1f %% ± %.1f faster than with %s",
                tried, percent, doubt, against)  # fmt: skip
        else:
            log_on_rank_0(logging.INFO, "gathers stay with %s: steps %.1f %% ± %.1f %s with %s",
                against, abs(percent), doubt, "faster" if percent > 0 else "slower", tried)  # fmt: skip
