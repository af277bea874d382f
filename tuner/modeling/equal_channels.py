"""Channel counts with the same effect: on little traffic fewer channels run than were asked for.

The store knows a call by what ran (`ring/ll/3ch`), a decision by what it asked for (`ring/ll/4ch`). It is one
setting, and is shown under one name: what was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ...agent.nccl.cost_model import channels_used
from ...store.records import Candidate, DecisionKey, size_class_range
from .medians import MeasuredSetting

MAX_CHANNELS: Final = 64
CONFIRMED: Final = 2
"""Calls that ran fewer channels, after which it is no accident."""


def as_offered(
    known: Mapping[Candidate, MeasuredSetting], offered: Collection[str], key: DecisionKey
) -> dict[Candidate, MeasuredSetting]:
    """What was measured at `key`, under the names of the settings on offer.

    Args:
        known: measured settings, by what ran.
        offered: settings that decisions may ask for, as text (`ring/ll/4ch`).
        key: where both are.

    Returns:
        Measured settings by what was asked for; those with the same effect are merged.
    """
    found: dict[Candidate, MeasuredSetting] = {}
    for candidate, measured in known.items():
        name = asked_for(candidate, offered, key)
        found[name] = measured.joined(found[name]) if name in found else measured
    return found


def asked_for(ran: Candidate, offered: Collection[str], key: DecisionKey) -> Candidate:
    """The setting on offer that has the effect of `ran` at this key.

    Args:
        offered: settings that decisions may ask for, as text (`ring/ll/4ch`).
        key: gives the collective and the range of sizes.

    Returns:
        `ran` if it is on offer; else the lowest channel count on offer that NCCL reduces to `ran` at some size of the
        key; else `ran`.
    """
    if ran.protocol is None or not ran.n_channels or str(ran) in offered:
        return ran
    low, high = size_class_range(key.size_class)
    for n_channels in range(ran.n_channels + 1, MAX_CHANNELS + 1):
        asked = Candidate(ran.algorithm, ran.protocol, n_channels)
        if str(asked) in offered:
            least, most = (channels_used(key.collective, ran.protocol, size, n_channels) for size in (low, high))
            if least <= ran.n_channels <= most:
                return asked
    return ran


class RunsFewer:
    """Settings that NCCL runs on fewer channels than it is asked for: they are others under another name.

    From 2.31 on it lets a tuner lower its own count, and never raise it.
    """

    def __init__(self) -> None:
        self._n_calls: Counter[tuple[DecisionKey, Candidate]] = Counter()

    def seen(self, key: DecisionKey, candidate: Candidate, calls: npt.NDArray[np.void]) -> int:
        """Take in calls of a setting.

        Args:
            key: where they ran.
            candidate: that was asked for, and ran but for its channels.
            calls: MEASUREMENT_FIELDS, shape [n].

        Returns:
            The channels that ran, once more than an accident shows that they are fewer; else 0.
        """
        if candidate.protocol is None or not candidate.n_channels:
            return 0
        ran, least_bytes = calls["n_channels"][calls["n_channels"] > 0], int(np.min(calls["message_bytes"]))
        used = channels_used(key.collective, candidate.protocol, least_bytes, candidate.n_channels)
        self._n_calls[key, candidate] += 2 * int(np.count_nonzero(ran < used)) - len(ran)
        return int(ran.max()) if len(ran) and self._n_calls[key, candidate] >= CONFIRMED else 0
