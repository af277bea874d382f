"""One number per synchronised backward pass of stage 3: whether a rank has used layers in a new order.

The maximum over ranks starts when the pass begins and is read when it ends, so its cost is negligible. On a device
that runs asynchronously, reading the number would make the program wait. There it is copied to the host without
waiting, and all ranks read it a fixed number of passes later. So the host waits only if it is that far ahead.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from .. import collectives, phases

N_BEHIND: Final = 4
"""Passes after which a number is read: as many steps as a host runs ahead of an asynchronous device."""


class OrderChanges:
    """Tells all ranks of `group` that one of them has used layers in a new order.

    `runs_behind`: the device runs asynchronously; None: all but the CPU do.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, runs_behind: bool | None = None) -> None:
        self._runs_behind = device.type != "cpu" if runs_behind is None else runs_behind
        self._copied = torch.zeros(N_BEHIND, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copies_done = [] if device.type == "cpu" else [torch.Event(device) for _ in range(N_BEHIND)]
        self._n_passes = 0
        self._group = group
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._work: collectives.Work | None = None
        self.seen_here = False
        """Whether this rank has used layers in a new order since the ranks last agreed on one."""

    def open(self) -> None:
        """Starts the maximum; every rank calls this at the same point of its step."""
        self._number.fill_(int(self.seen_here))
        phases.announce(phases.OTHER)
        self._work = collectives.maximum(self._number, self._group)

    def close(self) -> bool:
        """Reads the result: whether a rank has used layers in a new order."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return self._earlier_answer() if self._runs_behind else bool(self._number.item())

    def _earlier_answer(self) -> bool:
        """The number of N_BEHIND passes ago; begins to copy this pass's number, which the device may not have yet."""
        place = self._n_passes % N_BEHIND
        self._n_passes += 1
        done = self._copies_done[place] if self._copies_done else None
        if done is not None:
            done.synchronize()
        if self._copied[place].item():  # later passes reported it again, as no rank had read it
            for pending in self._copies_done:
                pending.synchronize()
            self._copied.zero_()
            return True
        self._copied[place].copy_(self._number[0], non_blocking=True)
        if done is not None:
            done.record()
        return False
