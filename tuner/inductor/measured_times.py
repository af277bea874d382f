"""Durations of collectives from the store, for the sizes in a graph."""

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
"""Most measurements, the newest; reading them takes about a second."""
MAX_GAP: Final = 5.0
"""Between sizes further apart than this factor NCCL may change its setting, so there is no estimate."""
STEP: Final = 1.05
"""Times are rounded to steps of this factor, since inductor compiles anew whenever one changes."""
PACKED_VERSION: Final = 1

Place = tuple[int, int, int]
"""Collective, ranks, nodes."""


class MeasuredTimes(msgspec.Struct, frozen=True):
    """Microseconds by message bytes, sizes ascending, of each collective on each communicator class.

    The times are those of the last rank to arrive, at the network's usual speed, so they do not include waiting for
    late ranks.
    """

    curves: Mapping[Place, tuple[tuple[int, float], ...]] = {}
    version: int = PACKED_VERSION

    @classmethod
    def of_store(cls, path: Path | str, fabric_id: str) -> MeasuredTimes:
        """Times measured on a fabric with the setting in force at each size.

        That is the setting that the last job's decisions proved, or else NCCL's own choice; trials of other settings
        are left out.
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
        """The inverse of `pack`; empty if the bytes are of another version."""
        try:
            found = msgspec.msgpack.decode(packed, type=cls)
        except msgspec.DecodeError:
            return cls()
        return found if found.version == PACKED_VERSION else cls()

    def pack(self) -> bytes:
        """The times as msgpack."""
        return msgspec.msgpack.encode(self)

    def us(self, collective: Collective, communicator: CommunicatorClass, message_bytes: int) -> float | None:
        """Microseconds of a collective, by log-log interpolation between measured sizes.

        The time is None outside the measured sizes, or if the nearest sizes are more than MAX_GAP apart.
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
