"""How a rank tells the others about an error of its own, at a collective that all take part in anyway.

A rank that finds a parameter changed behind the runtime's back cannot raise there and then: the others would
wait for it forever. It goes on, and contributes one number to a maximum over all ranks, which starts when a
synchronised backward pass begins and is read when it ends; so every rank raises the same error. The collective
overlaps the pass, so it costs next to nothing. It also tells the others that a rank has used layers in
a new order.

On a device that runs asynchronously, reading the number would make the program wait. There it is copied to the host
without waiting, and read when the next pass ends: one step later, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerotune.zero_runtime import collectives, phases
from zerotune.zero_runtime.errors import LifecycleError

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
        self._copied = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copy_done: torch.Event | None = None
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
        answer = self._last_answer() if self._runs_behind else int(self._number.item())
        if answer > _ORDER_CHANGED:
            self._fault = 0
            place, index = divmod(answer - 1 - _ORDER_CHANGED, _MOST_PARAMETERS)
            rank, kind = divmod(place, len(_KINDS))
            raise LifecycleError(
                f"parameter {self._names[index]} {_KINDS[kind]} outside the runtime on rank {rank}; change "
                "parameters through engine.full_parameters() or engine.load_state_dict()"
            )
        return answer == _ORDER_CHANGED

    def _last_answer(self) -> int:
        """The last pass's number; begins to copy this one's, which the device may not have reached."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        answer = int(self._copied.item())
        if answer:  # this pass reported it again, since no rank had read it
            self._copied.zero_()
            return answer
        self._copied.copy_(self._number, non_blocking=True)
        if self._number.device.type != "cpu":
            self._copy_done = torch.Event(self._number.device)
            self._copy_done.record()
        return answer
