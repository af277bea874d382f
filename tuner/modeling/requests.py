"""Decides when the daemon's learner loads the knowledge of a fabric or first fits its model anew."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

import msgspec

TRAIN_EVERY_MEASUREMENTS: Final = 5_000
TRAIN_PAUSE_S: Final = 60.0
MAX_FABRICS: Final = 1024
"""Most fabrics in memory, one for each job that can connect; the oldest are dropped, since the store has them."""


class RequestKind(Enum):
    """The kinds of requests to a learner."""

    load = "load"
    train = "train"


class Request(NamedTuple):
    """A request to load the knowledge of a fabric, or to fit its model anew first."""

    kind: RequestKind
    fabric_id: str


class _Fabric(msgspec.Struct):
    knowledge: object | None = None
    asked_at_s: float = float("-inf")
    n_new: int = 0
    """Measurements since the model was last fitted."""


class Learning:
    """The knowledge of each fabric that the learner has delivered; never waits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fabrics: dict[str, _Fabric] = {}
        self.on_request: Callable[[Request], None] = lambda _: None
        """Called with work for the learner; must not block."""

    def knowledge_of(self, fabric_id: str) -> object | None:
        """The knowledge of a fabric; None until loaded. It is requested at once, and again after a pause."""
        fabric = self._of(fabric_id)
        if fabric.knowledge is None and self._clock() - fabric.asked_at_s >= TRAIN_PAUSE_S:
            fabric.asked_at_s = self._clock()
            self.on_request(Request(RequestKind.load, fabric_id))
        return fabric.knowledge

    def load_anew(self) -> None:
        """Load the knowledge of every fabric met so far again."""
        for fabric_id in self._fabrics:
            self.on_request(Request(RequestKind.load, fabric_id))

    def ready(self, fabric_id: str, knowledge: object) -> None:
        """The learner has delivered the knowledge of a fabric."""
        self._of(fabric_id).knowledge = knowledge

    def measured(self, fabric_id: str, n_measurements: int) -> None:
        """Count new measurements; request a fit once there are enough, but not too often."""
        fabric = self._of(fabric_id)
        fabric.n_new += n_measurements
        if fabric.n_new >= TRAIN_EVERY_MEASUREMENTS and self._clock() - fabric.asked_at_s >= TRAIN_PAUSE_S:
            self._train(fabric_id, fabric)

    def job_ended(self, fabric_id: str) -> None:
        """Request a fit, so that the next job starts with this one's measurements."""
        fabric = self._fabrics.get(fabric_id)
        if fabric is not None and fabric.n_new:
            self._train(fabric_id, fabric)

    def _of(self, fabric_id: str) -> _Fabric:
        """The entry of a fabric, which becomes the newest."""
        fabric = self._fabrics[fabric_id] = self._fabrics.pop(fabric_id, _Fabric())
        if len(self._fabrics) > MAX_FABRICS:
            del self._fabrics[next(iter(self._fabrics))]
        return fabric

    def _train(self, fabric_id: str, fabric: _Fabric) -> None:
        fabric.n_new, fabric.asked_at_s = 0, self._clock()
        self.on_request(Request(RequestKind.train, fabric_id))
