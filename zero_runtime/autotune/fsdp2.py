"""Runs FSDP2's all-gathers on variants of their process group, and changes the variant while training runs.

All ranks of a process group gather in the same order, since each gather is a collective. So "before gather n" is the
same place in all their programs, and ranks meet there for a maximum, which decides for all of them. A *pass* begins
when the parameters that gathered first gather again for a forward. The passes between two optimizer steps are one step
of the search: gradient accumulation makes them several.

Ranks learn without a wait whether all of them take part. Each counts itself in the job's store before its first gather,
and reads the count when that gather has completed on all ranks.

A rank on which zerotune fails goes on counting gathers, and all ranks leave at their next meeting. If it left alone,
the others would wait for it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import mode
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import collectives
from ..checks import communicator_variants
from ..errors import SettingsError
from .agreement import Boundaries
from .choices import Choices, StepSettings
from .measures import UNLIMITED_BYTES, clock_of
from .variants import READY_AFTER, Variants, log_on_rank_0, logger, reason, why_not

LAST_MEETING: Final = 16 * READY_AFTER
"""Passes after which ranks no longer wait for an optimizer that has not stepped twice."""
GONE_AFTER: Final = 1024
"""Gathers without the parameters that gathered first, until their model counts as gone; a layer has two a pass."""
MOST_UNLIKE: Final = 32
"""Most steps whose number of gathers differs from the step before; each of them begins a window anew."""
LEFT: Final = "gathers of process group %s stay as they are: %s"
Answer = TypeVar("Answer")
_n_made: Counter[str] = Counter()
"""Number of `Gathers` for each group and list of variants, so that all ranks name them alike."""


class Stopped(Exception):
    """All ranks stop trying variants, with the reason."""


class Gathers:
    """The gathers of one process group."""

    def __init__(self, group: dist.ProcessGroup, wanted: Sequence[Mapping[str, int]], device: torch.device) -> None:
        self.group = group
        self._in_use = group
        self._wanted, self._device = wanted, device
        self._now_us = clock_of(group, device)
        self._variants = Variants(group, device, wanted, self._meet)
        self._first: object = None
        self._n_gathers = self._first_at = self._n_passes = self._n_unlike = 0
        self._meets_at = READY_AFTER
        self._has_stepped = False
        self._stepped_at = self._period = 0
        self._periods: list[int] = []
        """Passes from one optimizer step to the next."""
        self._gathers_at = self._gathers_per_step = 0
        self._boundaries: Boundaries | None = None
        self._unhook: Callable[[], None] = lambda: None
        self._failure = ""
        """Why zerotune failed on this rank, until all ranks know."""
        key = f"{group.group_name}/{self._wanted}"
        _n_made[key] += 1
        self._key = f"{key}/{_n_made[key]}"
        self._joined_as = 0
        """This rank's place among those that take part, from 1; 0: the others do not know of it."""
        try:
            why = why_not(group)
        except Exception as error:  # a group of an unknown kind
            why = reason(error)
        self._is_over = bool(why)
        if why:
            self._log_left(why)
        else:
            self._unhook = register_optimizer_step_post_hook(self._stepped).remove

    def _stepped(self, *_: Any) -> None:
        self._has_stepped = True  # and no more: torch.compile may make it part of the optimizer

    def next_group(self, place: object) -> dist.ProcessGroup:
        """The group that the next gather runs on; `place` identifies the parameters that are gathered."""
        if not self._is_over:
            try:
                self._count(place)
            except Stopped as stopped:  # on all ranks
                self._in_use = self.group
                self._leave(str(stopped))
                self._safely(self._destroy, None)
            except Exception as error:  # training must not meet it
                self._failure = self._failure or reason(error)
        return self._in_use

    def _count(self, place: object) -> None:
        self._n_gathers += 1
        if self._first is None:
            self._first = place
            self._joined_as = self._safely(lambda: self._joined(1), 0)
        if place is self._first:
            self._first_at = self._n_gathers
        elif self._n_gathers - self._first_at > GONE_AFTER:
            self._first, self._first_at = place, self._n_gathers
            if self._boundaries is not None:
                self._boundaries.begin_anew()
        is_pass = place is self._first and torch._C._current_graph_task_id() == -1  # not in backward
        self._n_passes += is_pass
        if self._safely(self._is_captured, False):
            self._in_use = self.group
            self._leave("they are captured in a CUDA graph")
        elif is_pass and self._boundaries is None:
            self._learn()
        elif is_pass and self._boundaries is not None and (self._n_passes - self._stepped_at) % self._period == 0:
            self._step_begins(self._boundaries)

    def _is_captured(self) -> bool:
        own = getattr(self.group, "is_capturing", None)  # an emulated group's
        return bool(own() if own is not None else torch.cuda.is_current_stream_capturing())

    def _safely(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The answer, or `otherwise` if asking fails; all ranks learn of the failure at the next meeting."""
        try:
            return ask()
        except Exception as error:
            self._failure = self._failure or reason(error)
            return otherwise

    def _joined(self, n: int) -> int:
        """Ranks that take part, with `n` more."""
        return int(c10d._get_default_store().add(f"zerotune/variants/{self._key}", n))

    def _learn(self) -> None:
        """Learn how many passes a step has; once memory is filled, create the variants."""
        if self._has_stepped:
            self._has_stepped = False
            if self._stepped_at:
                self._periods.append(self._n_passes - self._stepped_at)
            self._stepped_at = self._n_passes
        if self._n_passes < self._meets_at:
            return
        self._safely(self._now_us, 0.0)  # waits until the first gather is done
        n_joined = self._safely(lambda: self._joined(0), 0)
        if not self._joined_as or n_joined not in (0, self.group.size()):
            self._leave("")
            self._safely(lambda: self._joined(self.group.size() + 1), 0)  # never enough, should a rank join later
            if self._joined_as == 1 or self._joined_as > self.group.size():  # rank 0 may not take part
                why = "not all ranks enabled the same communicator_variants"
                logger.warning("zerotune: " + LEFT, self.group.group_name, why)
            return
        mine = [int(not self._periods), mode(self._periods or [0]), self._stepped_at]
        is_unknown, self._period, self._stepped_at = self._meet(mine)
        if is_unknown:
            self._meets_at *= 2
            if self._meets_at > LAST_MEETING:
                self._leave("no optimizer was seen to step")
            return
        numbers = self._variants.make()
        if len(numbers) == 1:
            self._leave("")
            return
        self._unhook()
        self._gathers_at = self._n_gathers
        self._boundaries = Boundaries(
            Choices((0,), (0,), variants=numbers),
            StepSettings(0, 0),
            self.group.rank(),
            self.group.size(),
            self._meet,
            lambda: self._safely(self._now_us, 0.0),
            lambda: UNLIMITED_BYTES,
        )

    def _step_begins(self, boundaries: Boundaries) -> None:
        search = boundaries.search
        if search.is_settled:  # since the last step: no call is under way on groups that are not in use
            self._leave("")
            self._variants.keep(search.leader.variant)
            return
        n_gathers, self._gathers_at = self._n_gathers - self._gathers_at, self._n_gathers
        if n_gathers != self._gathers_per_step:  # an evaluation, for example
            self._gathers_per_step = n_gathers
            boundaries.begin_anew()
            self._n_unlike += 1
            if self._n_unlike > MOST_UNLIKE:
                raise Stopped("steps differ in what they gather")
        changed = boundaries.step_ended()
        if changed is not None:
            self._in_use = self._variants.groups[changed.variant]
        self._variants.report(search.judged)

    def _leave(self, why: str) -> None:
        """Let gathers stay on the group in use; `why` is empty if the search is complete."""
        self._is_over = True
        self._unhook()
        if why:
            self._log_left(why)

    def _destroy(self) -> None:
        self._now_us()  # nothing is under way
        self._variants.keep(0)

    def _log_left(self, why: str) -> None:
        log_on_rank_0(logging.WARNING, LEFT, self.group.group_name, why)

    def _meet(self, numbers: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each number; raises `Stopped` on all ranks if zerotune has failed on one."""
        greatest = torch.tensor([*numbers, bool(self._failure)], dtype=torch.int64, device=self._device)
        collectives.maximum(greatest, self.group).wait()
        *found, has_failed = greatest.tolist()
        if has_failed:
            raise Stopped(self._failure or "zerotune failed on another rank")
        return found


def vary(wanted: Sequence[Mapping[str, int]]) -> None:
    """Let models that `fully_shard` shards from now on gather on variants of their process groups. Never raises.

    Each variant has the fields of NCCL's config in which it differs.
    """
    try:
        wanted = communicator_variants(wanted)
        from torch.distributed.fsdp import FSDPModule, fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
    except (SettingsError, ImportError) as error:
        if os.environ.get("RANK", "0") == "0":
            logger.warning("zerotune: no communicator variant is tried: %s", error)
        return
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        logger.warning("zerotune: no communicator variant is tried: FSDP2 of torch %s has no way", torch.__version__)
        return
    known: dict[str, Gathers] = {}
    """By process group: models that come later go on with its communicators, and with what was found."""

    # FSDP2 lets a later setting replace a gather of this class, and allocates memory as without it.
    class AllGather(DefaultAllGather):
        def __init__(self) -> None:
            self.gathers: dict[str, Gathers] = {}

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            name = group.group_name
            mine = self.gathers.get(name)
            if mine is None or mine.group is not group:
                mine = known.get(name)
                if mine is None or mine.group is not group:
                    mine = known[name] = Gathers(group, wanted, output_tensor.device)
                self.gathers[name] = mine
            return super().__call__(output_tensor, input_tensor, mine.next_group(self), async_op)

    @functools.wraps(fully_shard)
    def fully_shard_varied(module: Any, *args: Any, **kwargs: Any) -> Any:
        made = fully_shard(module, *args, **kwargs)
        try:
            (made[0] if isinstance(made, list | tuple) else made).set_custom_all_gather(AllGather())
        except Exception as error:  # parameters of one module on several meshes
            logger.warning("zerotune: gathers of a module stay as they are: %s", error)
        return made

    for module in tuple(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("fully_shard") is fully_shard:
            module.fully_shard = fully_shard_varied  # type: ignore[attr-defined]  # a name of a module
