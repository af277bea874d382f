"""Variants of the whole plan with fewer channels, prepared a few keys at a time.

Channels hold multiprocessors: under overlap, fewer of them may train faster although each collective alone
is slower. A variant caps the channels of every key; what each key would run under each cap follows from its
posterior, which costs too much to be worked out for a thousand keys at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from agent.nccl.catalog import CHANNEL_LADDER
from store.records import Candidate
from tuner.policy.step_trial import Variant
from tuner.policy.trial import KeyState

KEYS_PER_CALL: Final = 12


class Fallback(NamedTuple):
    """What a key would run under a cap, and what a step of it may cost (us) over what runs now."""

    candidate: Candidate
    extra_us: float


class CapSearch:
    """Goes over all keys once; `advance` until `is_done`, then ask for `variants`."""

    def __init__(self, states: list[KeyState]) -> None:
        most = max((state.n_channels for state in states), default=0)
        self.caps = [rung for rung in reversed(CHANNEL_LADDER) if rung < most]
        running = [(state, state.n_channels) for state in states]
        self._waiting: Iterator[tuple[KeyState, int]] = iter(running if self.caps else ())
        self._found: dict[int, dict[int, Fallback]] = {cap: {} for cap in self.caps}
        self.is_done = not self.caps

    def advance(self, fallbacks: Callable[[KeyState, list[int]], dict[int, Fallback]]) -> None:
        """Look at a few more keys; `fallbacks` says what a key would run under each of the caps."""
        n_looked_at = 0
        for state, running in self._waiting:
            caps = [cap for cap in self.caps if cap < running]
            if not caps:
                continue
            for cap, fallback in fallbacks(state, caps).items():
                self._found[cap][state.index] = fallback
            n_looked_at += 1
            if n_looked_at >= KEYS_PER_CALL:
                return
        self.is_done = True

    def variants(self, affordable_us: float) -> tuple[list[Variant], bool]:
        """Those whose cost per step fits, the mildest first; and whether all of them do."""
        fitting, all_fit = [], True
        for cap in self.caps:
            changes = {index: fallback.candidate for index, fallback in self._found[cap].items()}
            risk_us = sum(max(0.0, fallback.extra_us) for fallback in self._found[cap].values())
            if not changes:
                continue
            if risk_us <= affordable_us:
                fitting.append(Variant(f"at most {cap} channels", changes, cap, risk_us))
            else:
                all_fit = False
        return fitting, all_fit


def cheapest_within(
    options: tuple[Candidate, ...], mean: np.ndarray, allowed: Callable[[Candidate], bool], caps: list[int]
) -> dict[int, int]:
    """Per cap the index of the allowed option with so many channels or fewer that has the lowest `mean`."""
    best: dict[int, int] = {}
    order = sorted(
        (at for at, option in enumerate(options) if option.n_channels and math.isfinite(mean[at])),
        key=lambda at: float(mean[at]),
    )
    for at in order:
        option = options[at]
        open_caps = [cap for cap in caps if cap >= option.n_channels and cap not in best]
        if open_caps and allowed(option):
            best |= dict.fromkeys(open_caps, at)
            if len(best) == len(caps):
                break
    return best
