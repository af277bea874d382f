"""The order of stage 3's gathers and reductions, the same on every rank whatever each of them computes.

Every rank must issue the same collectives in the same order, also where one of them skips a layer or a parameter
that the others use. So units are gathered in an agreed order: a rank that skips one gathers it all the same, and
sends zeros as its gradients where the others send theirs. Before the first training step the agreed order is
the model's own; then the ranks say once what they saw, and agree on the order of use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import collectives, phases
from .unit import Unit


class Order:
    """Agreed order of units, and what this rank saw of its own.

    Args:
        units: in the model's order, the root first if it has parameters of its own.
        root_is_unit: the root is needed from the beginning of a pass to its end.
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
        if root_is_unit:  # its gradients come at any time
            units[0].schedule.late = [True] * len(units[0].schedule.late)

    @property
    def backward(self) -> list[Unit]:
        """The root, then layers from last to first."""
        root = self._units[0] if self._root_is_unit else None
        order = [*([root] if root else []), *(unit for unit in reversed(self.forward) if unit is not root)]
        return [unit for unit in order if unit in self._have_backward]

    @property
    def last(self) -> Unit:
        """Ends the forward and begins the backward."""
        return self.forward[-1]

    def begin_forward(self) -> None:
        """Forgets what was seen in the last one."""
        self._seen = []

    def see(self, unit: Unit) -> bool:
        """This rank uses the unit now; False when it used it before in this forward."""
        if unit in self._seen:
            self._repeated.add(unit)
            return False
        self._seen.append(unit)
        return True

    def see_backward(self, unit: Unit) -> None:
        """This rank's backward reaches the unit."""
        self._seen_backward.add(unit)

    def agree(self, group: dist.ProcessGroup) -> None:
        """Sends what this rank saw in the last forward and backward, and adopts what all ranks together saw."""
        n = len(self._units)
        place = {id(unit): position for position, unit in enumerate(self._seen)}
        late = [int(flag) for unit in self._units for flag in unit.schedule.late]
        mine = [
            *(place.get(id(unit), -1) for unit in self._units),
            *(int(unit in self._repeated) for unit in self._units),
            *(int(unit in self._seen_backward) for unit in self._units),
            *late,
        ]
        said = torch.tensor(mine, device=self._units[0].flats[0].device)
        phases.announce(phases.OTHER)
        collectives.maximum(said, group).wait()
        found = said.tolist()
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
