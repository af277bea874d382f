"""Variants of the plan with other channels, prepared a few keys at a time.

Channels hold multiprocessors: under overlap, fewer of them may train faster although each collective alone
is slower. A variant caps the channels of every key, or of one group of keys: what is waited for wants other settings
than what hides behind computation. Once trials have told what a channel costs, a variant may instead give each key the
setting that costs training least by that: one cap for all sizes takes too many from some and too few from others. What
each key would run follows from its posterior, which costs too much to be worked out for a thousand keys at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from zerotune.agent.nccl.catalog import CHANNEL_LADDER
from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.steps.step_trial import GroupChange, Variant, group_of
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import Floats

KEYS_PER_CALL: Final = 12
MOST_LOG_US: Final = 50.0
"""What is not known, or takes longer, is never the best."""
MOST_AT_ONCE: Final = 3
"""By no more than this factor are channels reduced in one go."""


FITTED: Final = 0
"""In place of a cap: what costs training least by what is known of channels."""


class Fallback(NamedTuple):
    """What a key would run under a cap, or fitted, and what that costs over what runs now, per step."""

    candidate: Candidate
    extra_us: float
    risk_us: float
    """What it may cost at worst."""
    released_us: float
    """Channels that are held no longer, times how long."""


class CapSearch:
    """Goes over all keys once; `advance` until `is_done`, then ask for `variants`."""

    def __init__(self, states: list[KeyState]) -> None:
        most = max((state.n_channels for state in states), default=0)
        self.caps = [rung for rung in reversed(CHANNEL_LADDER) if rung < most]
        running = [(state, state.n_channels) for state in states]
        self._waiting: Iterator[tuple[KeyState, int]] = iter(running if self.caps else ())
        self._found: dict[KeyState, dict[int, Fallback]] = {}
        """By key, what it would run under each cap, and fitted."""
        self.is_done = not self.caps

    def advance(self, fallbacks: Callable[[KeyState, list[int]], dict[int, Fallback]]) -> None:
        """Look at a few more keys; `fallbacks` says what a key would run under each of the caps."""
        n_looked_at = 0
        for state, running in self._waiting:
            caps = [cap for cap in self.caps if cap < running]
            if not caps:
                continue
            if found := fallbacks(state, caps):
                self._found[state] = found
            n_looked_at += 1
            if n_looked_at >= KEYS_PER_CALL:
                return
        self.is_done = True

    def variants(self) -> list[Variant]:
        """All of them, of the whole plan and of single groups.

        None has fewer than a third of the channels that run now: what hides behind computation does so only as long
        as it is not much longer, so what is known of one cap says little about a far lower one.
        """
        members: dict[str, list[KeyState]] = {}
        for state in self._found:
            members.setdefault(group_of(state), []).append(state)
        named = {"": [*self._found]}
        if len(members) > 1:
            named |= {f" for {group}": states for group, states in sorted(members.items())}
        variants = []
        for suffix, states in named.items():
            most = max((state.n_channels for state in states), default=0)
            fitted = {state: self._found[state][FITTED] for state in states if FITTED in self._found[state]}
            if fitted:
                variants.append(_variant(f"channels by what they cost training{suffix}", None, fitted))
            for cap in self.caps:
                chosen = {state: self._found[state][cap] for state in states if cap in self._found[state]}
                if chosen and cap * MOST_AT_ONCE >= most:
                    variants.append(_variant(f"at most {cap} channels{suffix}", cap, chosen))
        return variants


def _variant(name: str, cap: int | None, found: dict[KeyState, Fallback]) -> Variant:
    by_group: dict[str, GroupChange] = {}
    for state, fallback in found.items():
        before = by_group.get(group_of(state), GroupChange())
        by_group[group_of(state)] = GroupChange(
            before.extra_us + fallback.extra_us, before.released_us + fallback.released_us
        )
    settings = {state.index: fallback.candidate for state, fallback in found.items()}
    return Variant(name, settings, cap, by_group, sum(max(0.0, fallback.risk_us) for fallback in found.values()))


def least_cost(
    options: tuple[Candidate, ...],
    log_us: Floats,
    costs: tuple[float, float],
    now: tuple[int, float],
    allowed: Callable[[Candidate], bool],
) -> int | None:
    """The index of the allowed option that costs training least, None where what runs now does.

    Args:
        options: of the key.
        log_us: what each takes.
        costs: what a microsecond costs, whatever the channels, and for each channel.
        now: channels and microseconds of what runs now.
        allowed: whether an option may run.

    Returns:
        Index in `options`; None: what runs now costs least.
    """
    by_time, by_channel = costs
    now_channels, now_us = now
    channels = np.array([option.n_channels for option in options])
    costs_us = np.where(
        channels > 0, np.exp(np.minimum(log_us, MOST_LOG_US)) * (by_time + by_channel * channels), np.inf
    )
    for at in np.argsort(costs_us).tolist():
        if not costs_us[at] < now_us * (by_time + by_channel * now_channels):
            return None
        if allowed(options[at]):
            return int(at)
    return None


def cheapest_within(
    options: tuple[Candidate, ...], mean: np.ndarray, allowed: Callable[[Candidate], bool], caps: list[int]
) -> dict[int, int]:
    """The fastest option below each cap on channels.

    Args:
        options: of a key.
        mean: log duration of each, shape [n_options].
        allowed: whether an option may run.
        caps: channel counts.

    Returns:
        Index in `options`, by cap; caps without an option are left out.
    """
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
