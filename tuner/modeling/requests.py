"""What the daemon asks its learner for, and when: to load what is known of a fabric, or to fit its model anew first."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

import msgspec

TRAIN_EVERY_MEASUREMENTS: Final = 5_000
TRAIN_PAUSE_S: Final = 60.0
MAX_FABRICS: Final = 1024
"""As many as jobs can be connected; beyond that, those met longest ago are forgotten: the store has them."""


class RequestKind(Enum):
    """What a learner can be asked for."""

    load = "load"
    train = "train"


class Request(NamedTuple):
    """Load what is known of a fabric, or fit its model anew first."""

    kind: RequestKind
    fabric_id: str


class _Fabric(msgspec.Struct):
    knowledge: object | None = None
    asked_at_s: float = float("-inf")
    n_new: int = 0
    """Measurements since the model was last fitted."""


class Learning:
    """What is known of each fabric, as far as the learner has delivered it; never waits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fabrics: dict[str, _Fabric] = {}
        self.on_request: Callable[[Request], None] = lambda _: None
        """Called with work for the learner; must not block."""

    def knowledge_of(self, fabric_id: str) -> object | None:
        """What is known of a fabric; None until it has come, which is asked for, and after a pause again."""
        fabric = self._of(fabric_id)
        if fabric.knowledge is None and self._clock() - fabric.asked_at_s >= TRAIN_PAUSE_S:
            fabric.asked_at_s = self._clock()
            self.on_request(Request(RequestKind.load, fabric_id))
        return fabric.knowledge

    def load_anew(self) -> None:
        """What is known of every fabric met so far is to be loaded again."""
        for fabric_id in self._fabrics:
            self.on_request(Request(RequestKind.load, fabric_id))

    def ready(self, fabric_id: str, knowledge: object) -> None:
        """The learner has loaded or fitted."""
        self._of(fabric_id).knowledge = knowledge

    def measured(self, fabric_id: str, n_measurements: int) -> None:
        """Count new measurements; requests a fit when there are enough of them, but not too often."""
        fabric = self._of(fabric_id)
        fabric.n_new += n_measurements
        if fabric.n_new >= TRAIN_EVERY_MEASUREMENTS and self._clock() - fabric.asked_at_s >= TRAIN_PAUSE_S:
            self._train(fabric_id, fabric)

    def job_ended(self, fabric_id: str) -> None:
        """Request a fit, so that the next job starts from all that this one measured."""
        fabric = self._fabrics.get(fabric_id)
        if fabric is not None and fabric.n_new:
            self._train(fabric_id, fabric)

    def _of(self, fabric_id: str) -> _Fabric:
        """What is kept of a fabric, which is the newest to be asked for now."""
        fabric = self._fabrics[fabric_id] = self._fabrics.pop(fabric_id, _Fabric())
        if len(self._fabrics) > MAX_FABRICS:
            del self._fabrics[next(iter(self._fabrics))]
        return fabric

    def _train(self, fabric_id: str, fabric: _Fabric) -> None:
        fabric.n_new, fabric.asked_at_s = 0, self._clock()
        self.on_request(Request(RequestKind.train, fabric_id))
