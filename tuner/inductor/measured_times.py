"""What collectives took, from the store, for sizes that a graph has."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ...store.records import BASELINE, Collective, CommunicatorClass, DecisionKey, Outcome, Phase, size_class
from ...store.sqlite.database import Store
from ...store.sqlite.rows.measurements import candidate_of
from ..decided import proven_decisions
from ..modeling.statistics import at_usual_level

MAX_ROWS: Final = 200_000
"""The newest measurements, which take about a second to read."""
MAX_GAP: Final = 5.0
"""Between sizes further apart than this factor NCCL may change its setting, and no time is told."""
STEP: Final = 1.05
"""Times are kept in steps of this factor: inductor's cache compiles anew whenever one of them changes."""
PACKED_VERSION: Final = 1

Place = tuple[int, int, int]
"""Collective, ranks, nodes."""


class MeasuredTimes(msgspec.Struct, frozen=True):
    """Microseconds by message bytes, sizes rising, of each collective on each shape of communicator.

    The times are those that the last rank to arrive saw, at the network's usual speed: waiting for late ranks is not in
    them.
    """

    curves: Mapping[Place, tuple[tuple[int, float], ...]] = {}
    version: int = PACKED_VERSION

    @classmethod
    def of_store(cls, path: Path | str, fabric_id: str) -> MeasuredTimes:
        """What was measured on a fabric, of the setting that is in force at each size.

        That is the one that decisions of the last job proved, and NCCL's own choice where they proved none; trials of
        others are left out.

        Raises:
            StoreError: there is no store at `path`, or it cannot be read.
        """
        with Store.open(path, read_only=True) as store:
            rows = at_usual_level(store, fabric_id, limit=MAX_ROWS)
            in_force = {
                key: decision.candidate
                for key, decision in proven_decisions(store.decisions(fabric_id=fabric_id)).items()
            }
        found: dict[Place, dict[int, list[float]]] = {}
        for row in rows[(rows["outcome"] == Outcome.ok) & (rows["duration_us"] > 0)]:
            shape = CommunicatorClass(int(row["n_ranks"]), int(row["n_nodes"]))
            collective, nbytes = Collective(int(row["collective"])), int(row["message_bytes"])
            key = DecisionKey(shape, collective, Phase(int(row["phase"])), size_class(nbytes))
            setting = in_force.get(key, BASELINE)
            ran = candidate_of(int(row["algorithm"]), int(row["protocol"]), int(row["n_channels"]))
            if row["is_default"] if setting.is_baseline else ran == setting and not row["is_default"]:
                by_bytes = found.setdefault((int(collective), shape.n_ranks, max(1, shape.n_nodes)), {})
                by_bytes.setdefault(nbytes, []).append(float(row["duration_us"]))
        return cls(
            {
                place: tuple((nbytes, _stepped(float(np.median(by_bytes[nbytes])))) for nbytes in sorted(by_bytes))
                for place, by_bytes in found.items()
            }
        )

    @classmethod
    def unpack(cls, packed: bytes) -> MeasuredTimes:
        """The inverse of `pack`; nothing is known where the bytes are not of this version."""
        try:
            found = msgspec.msgpack.decode(packed, type=cls)
        except msgspec.DecodeError:
            return cls()
        return found if found.version == PACKED_VERSION else cls()

    def pack(self) -> bytes:
        """The times as msgpack."""
        return msgspec.msgpack.encode(self)

    def us(self, collective: Collective, communicator: CommunicatorClass, message_bytes: int) -> float | None:
        """Microseconds of a collective, between measured sizes on a straight line of logs.

        Returns:
            The time; None outside of what was measured, or where the nearest sizes are more than MAX_GAP apart.
        """
        curve = self.curves.get((int(collective), communicator.n_ranks, communicator.n_nodes), ())
        at = bisect.bisect_left(curve, (message_bytes, -math.inf))
        if at < len(curve) and curve[at][0] == message_bytes:
            return curve[at][1]
        if not 0 < at < len(curve):
            return None
        (below, below_us), (above, above_us) = curve[at - 1], curve[at]
        if above > MAX_GAP * below:
            return None
        share = math.log(message_bytes / below) / math.log(above / below)
        return float(below_us * (above_us / below_us) ** share)


def _stepped(us: float) -> float:
    return float(STEP ** round(math.log(us, STEP)))
