"""How a rank tells the others about an error of its own, at a collective that all take part in anyway.

A rank that finds a parameter changed behind the runtime's back cannot raise there and then: the others would
wait for it forever. It goes on, and contributes one number to a maximum over all ranks, which starts when a
synchronised backward pass begins and is read when it ends; so every rank raises the same error. The collective
overlaps the pass, so it costs next to nothing. It also tells the others that a rank has used layers in
a new order.

On a device that runs asynchronously, reading the number would make the program wait. There it is copied to the host
without waiting, and read some passes later, on all ranks alike. So the host waits only where it is that far ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from zerotune.zero_runtime import collectives, phases
from zerotune.zero_runtime.errors import LifecycleError

N_BEHIND: Final = 4
"""Passes after which a number is read: as many steps as hosts run ahead of a device that is not waited for."""
_ORDER_CHANGED = 1
_KINDS = ("was replaced by another tensor", "was given new storage", "was written in place")
_MOST_PARAMETERS = 1 << 32


class RankErrors:
    """One number per synchronised backward pass.

    Args:
        names: of all parameters, in the same order on every rank.
        groups: meet one after another: the ranks that share the data, then, with model parallelism, the ranks
            that share the model.
        runs_behind: the device works on after a call has returned; None: all but the CPU do.
    """

    def __init__(
        self,
        names: Sequence[str],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        *,
        runs_behind: bool | None = None,
    ) -> None:
        self._runs_behind = device.type != "cpu" if runs_behind is None else runs_behind
        self._copied = torch.zeros(N_BEHIND, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copies_done = [] if device.type == "cpu" else [torch.Event(device) for _ in range(N_BEHIND)]
        self._n_passes = 0
        self._names = tuple(names)
        self._groups = tuple(groups)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._work: collectives.Work | None = None
        self._fault = 0
        self.order_changed = False

    def report(self, name: str, kind: str) -> None:
        """This rank found `kind` ("was replaced …") done to a parameter; the first finding counts."""
        if not self._fault:
            place = (dist.get_rank() * len(_KINDS) + _KINDS.index(kind)) * _MOST_PARAMETERS
            self._fault = 1 + _ORDER_CHANGED + place + self._names.index(name)

    def open(self) -> None:
        """Starts the maximum; every rank calls this at the same place of its step."""
        self._number.fill_(self._fault or (_ORDER_CHANGED if self.order_changed else 0))
        phases.announce(phases.OTHER)
        self._work = collectives.maximum(self._number, self._groups[0])

    def close(self) -> bool:
        """Reads the result: whether a rank used layers in a new order.

        Raises:
            LifecycleError: on every rank, what a rank found.
        """
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        for group in self._groups[1:]:
            phases.announce(phases.OTHER)
            collectives.maximum(self._number, group).wait()
        answer = self._earlier_answer() if self._runs_behind else int(self._number.item())
        if answer > _ORDER_CHANGED:
            self._fault = 0
            place, index = divmod(answer - 1 - _ORDER_CHANGED, _MOST_PARAMETERS)
            rank, kind = divmod(place, len(_KINDS))
            raise LifecycleError(
                f"parameter {self._names[index]} {_KINDS[kind]} outside the runtime on rank {rank}; change "
                "parameters through engine.full_parameters() or engine.load_state_dict()"
            )
        return answer == _ORDER_CHANGED

    def _earlier_answer(self) -> int:
        """The number of N_BEHIND passes ago; begins to copy this one's, which the device may not have reached."""
        place = self._n_passes % N_BEHIND
        self._n_passes += 1
        done = self._copies_done[place] if self._copies_done else None
        if done is not None:
            done.synchronize()
        answer = int(self._copied[place].item())
        if answer:  # the passes since then reported it again, since no rank had read it
            for pending in self._copies_done:
                pending.synchronize()
            self._copied.zero_()
            return answer
        self._copied[place].copy_(self._number[0], non_blocking=True)
        if done is not None:
            done.record()
        return answer
