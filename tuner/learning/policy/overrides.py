"""Decides the setting of a key in a window by an ordered list: the first entry that applies decides.

`Override` is that list. A plan keeps the entry of every key: later charges and comparisons use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....store.records import BASELINE, Candidate
from .keys import KeyState, WindowOwner


class Override(IntEnum):
    """Why a key runs its setting, by precedence; `words` explain each to people."""

    words: str

    def __new__(cls, number: int, words: str) -> Override:
        """A member with its number in the list."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.words = words
        return member

    control = 0, "NCCL's own choice runs everywhere for two steps, to compare it with the plan"
    experiment = 1, "the guard suspects that it slows steps down, and compares steps with and without it"
    pause = 2, "an experiment compares steps without the settings it suspects"
    variant = 3, "another plan as a whole is compared by step time"
    first_look = 4, "a trial that this job has not measured yet: it ends by itself after two steps"
    trial = 5, "a candidate alternates with the usual setting"
    proven = 6, "earlier jobs proved it to be faster; it is verified on the side"
    provisional = 7, "it is faster so far, but not beyond doubt: it runs in 11 of 12 windows"
    incumbent = 8, "what was promoted, or NCCL's own choice"


def _flags(overrides: Iterable[Override]) -> npt.NDArray[np.bool_]:
    flags = np.zeros(len(Override), np.bool_)
    flags[[*overrides]] = True
    return flags


EXPLORING: Final = _flags({Override.experiment, Override.first_look, Override.trial, Override.provisional})
"""By override: the setting is not proven yet."""
CHARGED: Final = EXPLORING | _flags({Override.proven})
"""By override: calls are compared with the incumbent's, and the budget pays for their extra time."""
TENTATIVE: Final = EXPLORING | _flags({Override.variant})
"""By override: the plan must end by itself unless the daemon renews it."""


class Setting(NamedTuple):
    """The setting of one key, and the reason."""

    candidate: Candidate
    why: Override


class Window(NamedTuple):
    """Facts on the next window before any key's setting is decided."""

    forced: Mapping[int, Setting] = {}
    """By key index: the setting that an experiment or a variant requests."""
    unmeasured: Collection[int] = ()
    """Keys whose trial ends by itself after a first look."""
    is_overspent: bool = False
    """Only incumbents and settings that earlier jobs proved may run."""


def what_runs(state: KeyState, window: Window) -> Setting:
    """The setting of a key whose window has begun, by the first `Override` that applies, except control windows."""
    forced = window.forced.get(state.index)
    if forced is not None:
        return forced
    if state.window_owner is WindowOwner.trial and state.trial is not None and not window.is_overspent:
        is_new = state.index in window.unmeasured
        return Setting(state.trial, Override.first_look if is_new else Override.trial)
    if state.window_owner is WindowOwner.provisional and (state.provisional_is_proven or not window.is_overspent):
        return usual(state)
    return Setting(state.incumbent, Override.incumbent)


def usual(state: KeyState) -> Setting:
    """The setting of a key without a forced setting or a trial, if its provisional setting does not rest."""
    if state.provisional is None:
        return Setting(state.incumbent, Override.incumbent)
    return Setting(state.provisional, Override.proven if state.provisional_is_proven else Override.provisional)


CONTROL: Final = Setting(BASELINE, Override.control)
