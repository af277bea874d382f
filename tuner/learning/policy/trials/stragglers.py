"""Costs of exploration that were none: one absurd measurement among sane ones of the same setting.

A host that stops for ten seconds while a setting is on trial says nothing about the setting, and would eat up what the
budget earns in a quarter of an hour. What is charged beyond a limit is given back if it happened once and several other
measurements of the same setting stayed below that limit. As soon as it happens again, all of it is charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from zerotune.tuner.modeling.features import Floats, Ints

ENOUGH_SANE: Final = 3
"""So many other measurements of the same setting must be sane."""


@dataclass
class _Seen:
    n_sane: int
    n_absurd: int = 0
    beyond_us: float = 0.0
    given_back_us: float = 0.0


class Stragglers:
    """Tells what of the charges so far is to be given back, or taken back again; `slot` stands for a setting."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def reset(self) -> None:
        """Slots have another meaning from now on."""
        self._seen.clear()

    def corrections(self, slots: Ints, beyond_us: Floats, n_before: Ints) -> dict[int, float]:
        """What to add to the charges of some slots, mostly nothing.

        Args:
            slots: of each measurement.
            beyond_us: what each was charged beyond the limit; 0 or less where it was sane.
            n_before: how often each one's setting had been measured before.

        Returns:
            Microseconds by slot.
        """
        is_absurd = beyond_us > 0
        if not self._seen and not is_absurd.any():
            return {}
        found: dict[int, float] = {}
        for slot in {*self._seen, *slots[is_absurd].tolist()}.intersection(slots.tolist()):
            here = slots == slot
            seen = self._seen.setdefault(slot, _Seen(int(n_before[here][0])))
            n_absurd = int(np.count_nonzero(is_absurd[here]))
            seen.n_sane += int(np.count_nonzero(here)) - n_absurd
            seen.n_absurd += n_absurd
            seen.beyond_us += float(np.maximum(beyond_us[here], 0.0).sum())
            is_straggler = seen.n_absurd == 1 and seen.n_sane >= ENOUGH_SANE
            given_back_us = seen.beyond_us if is_straggler else 0.0
            if given_back_us != seen.given_back_us:
                found[slot] = seen.given_back_us - given_back_us
                seen.given_back_us = given_back_us
        return found
