"""Dynamic loss scaling for fp16: scales small gradients up, and skips steps with infinities.

scaler = zero_runtime.LossScaler(engine)
scaler.scale(loss).backward()
scaler.unscale_()                 # only before clipping
engine.clip_grad_norm_(1.0)
scaler.step(optimizer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import phases

if TYPE_CHECKING:
    from .engine import Engine


class LossScaler:
    """Multiplies the loss and divides the gradients in fp32; the scale halves on overflow, and doubles without it.

    Every rank sees every rank's overflow by an all-reduce of one number, so all skip the same steps.

    Args:
        growth_interval: steps without overflow after which the scale doubles.
        least: the scale is never halved below it.
    """

    def __init__(
        self, engine: Engine, initial: float = 2.0**16, growth_interval: int = 2000, least: float = 1.0
    ) -> None:
        self._engine = engine
        self.value = initial
        self._growth_interval = growth_interval
        self._least = least
        self._n_calm = 0
        self._overflowed: bool | None = None  # of the present gradients; None: not checked yet
        self.n_skipped = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.value

    @torch.no_grad()
    def unscale_(self) -> bool:
        """Divides the gradients by the scale, once per step; returns whether any rank overflowed."""
        if self._overflowed is None:
            engine = self._engine
            gradients = engine.finish_gradients()
            if gradients:
                torch._foreach_mul_(gradients, 1.0 / self.value)
            bad = torch.zeros(1, device=engine.flats[0].device)
            for gradient in gradients:
                bad += ~torch.isfinite(gradient.sum())
            for group in engine.disjoint_groups:
                phases.announce(phases.OTHER)
                engine.collectives.all_reduce(bad, group).wait()
            self._overflowed = bool(bad.item() > 0)
        return self._overflowed

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Steps unless a rank overflowed; adapts the scale; returns whether it stepped."""
        overflowed = self.unscale_()
        self._overflowed = None
        if overflowed:
            self.n_skipped += 1
            self._n_calm = 0
            self.value = max(self._least, self.value / 2)
            self._engine.zero_grad()
            return False
        self._n_calm += 1
        if self._n_calm == self._growth_interval:
            self._n_calm = 0
            self.value *= 2
        optimizer.step()
        return True

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"value": self.value, "n_calm": self._n_calm}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues with a checkpoint's state."""
        self.value, self._n_calm = float(state["value"]), int(state["n_calm"])
