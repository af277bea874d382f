"""Channel counts with the same effect: for small messages NCCL runs fewer channels than requested.

The store names a call by the setting that ran (`ring/ll/3ch`), a decision by the requested one (`ring/ll/4ch`).
Both are one setting and are shown under one name, the requested one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...agent.nccl.cost_model import channels_used
from ...store.records import Candidate, DecisionKey, size_class_range
from .medians import MeasuredSetting

MAX_CHANNELS: Final = 64
CONFIRMED: Final = 2
"""Calls that must run fewer channels before that is no accident."""


def as_offered(
    known: Mapping[Candidate, MeasuredSetting], offered: Collection[str], key: DecisionKey
) -> dict[Candidate, MeasuredSetting]:
    """Measurements at `key` by the `offered` setting (`ring/ll/4ch`); those with the same effect are merged."""
    found: dict[Candidate, MeasuredSetting] = {}
    for candidate, measured in known.items():
        name = asked_for(candidate, offered, key)
        found[name] = measured.joined(found[name]) if name in found else measured
    return found


def asked_for(ran: Candidate, offered: Collection[str], key: DecisionKey) -> Candidate:
    """The offered setting (`ring/ll/4ch`) that has the effect of `ran` at this key, or `ran` itself.

    It is the lowest offered channel count that NCCL reduces to `ran` at some size of the key.
    """
    if ran.protocol is None or not ran.n_channels or str(ran) in offered:
        return ran
    low, high = size_class_range(key.size_class)
    for n_channels in range(ran.n_channels + 1, MAX_CHANNELS + 1):
        asked = msgspec.structs.replace(ran, n_channels=n_channels)
        if str(asked) in offered:
            least, most = (channels_used(key.collective, ran.protocol, size, n_channels) for size in (low, high))
            if least <= ran.n_channels <= most:
                return asked
    return ran


class RunsFewer:
    """Finds settings that NCCL runs on fewer channels than requested, or with its own chunk size: they equal others.

    From 2.31 on NCCL lets a tuner lower its own channel count, but never raise it. In a group it keeps its own chunk
    size if the plan names several for one algorithm and protocol.
    """

    def __init__(self) -> None:
        self._n_calls: Counter[tuple[DecisionKey, Candidate]] = Counter()
        self._n_own: Counter[tuple[DecisionKey, Candidate]] = Counter()

    def seen(self, key: DecisionKey, candidate: Candidate, calls: npt.NDArray[np.void]) -> str:
        """Take in calls (MEASUREMENT_FIELDS) that ran the candidate's algorithm and protocol.

        Returns how it runs once `CONFIRMED` calls show that this is not as requested; else an empty text.
        """
        n_own = int(np.count_nonzero(calls["chunk_bytes"] != candidate.chunk_bytes))
        self._n_own[key, candidate] += 2 * n_own - len(calls)
        if n_own and self._n_own[key, candidate] >= CONFIRMED:
            return "with its own chunk size"
        if candidate.protocol is None or not candidate.n_channels:
            return ""
        ran, least_bytes = calls["n_channels"][calls["n_channels"] > 0], int(np.min(calls["message_bytes"]))
        used = channels_used(key.collective, candidate.protocol, least_bytes, candidate.n_channels)
        self._n_calls[key, candidate] += 2 * int(np.count_nonzero(ran < used)) - len(ran)
        return f"on {ran.max()} channels" if len(ran) and self._n_calls[key, candidate] >= CONFIRMED else ""
