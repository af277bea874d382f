"""The order of stage 3's gathers and reductions, which is the same on every rank, whatever each computes.

Every rank must issue the same collectives in the same order, even if a rank skips a layer or a parameter that others
use. So units are gathered in an agreed order: a rank that skips a unit still gathers it, and sends zeros as its
gradients when the others send theirs. Before the first training step the agreed order is the model's own. Then the
ranks exchange their orders once, and agree on the order of use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import collectives, phases
from .unit import Unit


class Order:
    """The agreed order of units, and this rank's own order of use.

    Args:
        units: in the model's order, the root first if it has parameters of its own.
        root_is_unit: the root is then needed from the beginning of a pass to its end.
    """

    def __init__(self, units: Sequence[Unit], root_is_unit: bool) -> None:
        self._units = tuple(units)
        self._root_is_unit = root_is_unit
        self.is_learned = False
        self.forward: list[Unit] = list(units)
        self.kept: set[Unit] = set()  # used several times in one forward: whole until their backward
        self._have_backward: set[Unit] = set(units)
        self._seen: list[Unit] = []
        self._seen_backward: set[Unit] = set()
        self._repeated: set[Unit] = set()
        if root_is_unit:  # its gradients may come at any time
            units[0].schedule.late = [True] * len(units[0].schedule.late)

    @property
    def backward(self) -> list[Unit]:
        """The root, then layers from last to first."""
        root = self._units[0] if self._root_is_unit else None
        order = [*([root] if root else []), *(unit for unit in reversed(self.forward) if unit is not root)]
        return [unit for unit in order if unit in self._have_backward]

    @property
    def last(self) -> Unit:
        """The unit that ends the forward and begins the backward."""
        return self.forward[-1]

    def begin_forward(self) -> None:
        """Forgets the last forward's order."""
        self._seen = []

    def see(self, unit: Unit) -> bool:
        """Records that this rank uses the unit now; False if it used it before in this forward."""
        if unit in self._seen:
            self._repeated.add(unit)
            return False
        self._seen.append(unit)
        return True

    def see_backward(self, unit: Unit) -> None:
        """Records that this rank's backward reaches the unit."""
        self._seen_backward.add(unit)

    def agree(self, group: dist.ProcessGroup) -> None:
        """Exchanges the ranks' orders of the last forward and backward, and adopts their common order."""
        n = len(self._units)
        place = {id(unit): position for position, unit in enumerate(self._seen)}
        late = [int(flag) for unit in self._units for flag in unit.schedule.late]
        mine = [
            *(place.get(id(unit), -1) for unit in self._units),
            *(int(unit in self._repeated) for unit in self._units),
            *(int(unit in self._seen_backward) for unit in self._units),
            *late,
        ]
        orders = torch.tensor(mine, device=self._units[0].flats[0].device)
        phases.announce(phases.OTHER)
        collectives.maximum(orders, group).wait()
        found = orders.tolist()
        used = sorted((found[i], i) for i in range(n) if found[i] >= 0)
        self.forward = [self._units[i] for _, i in used] or list(self._units)
        self.kept = {unit for unit, repeated in zip(self._units, found[n : 2 * n], strict=True) if repeated}
        self._have_backward = {
            unit for unit, has_backward in zip(self._units, found[2 * n : 3 * n], strict=True) if has_backward
        }
        self.is_learned = True
        flags = iter(found[3 * n :])
        for unit in self._units:
            unit.schedule.late = [bool(next(flags)) for _ in unit.schedule.late]
