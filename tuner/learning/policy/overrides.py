"""What runs at a key in a window: one ordered list, of which the first that applies decides.

`Override` is that list. A plan notes it for every key: what is charged and compared later is what was decided then.
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
    """Why a key runs what it runs; an earlier one goes before those after it. `words` are what people read."""

    words: str

    def __new__(cls, number: int, words: str) -> Override:
        """A member by its place in the list."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.words = words
        return member

    control = 0, "NCCL's own choice runs everywhere for two steps, to compare what is in force with"
    experiment = 1, "the guard suspects it of slowing steps down, and compares steps with and without it"
    pause = 2, "an experiment compares steps without what it suspects"
    variant = 3, "another plan as a whole is compared by step time"
    first_look = 4, "a trial that this job has not measured yet: it gives way by itself after two steps"
    trial = 5, "a candidate takes turns with what usually runs"
    proven = 6, "earlier jobs proved it to be faster; it is verified on the side"
    provisional = 7, "it is faster so far, but not beyond doubt: it runs in 11 of 12 windows"
    incumbent = 8, "what was promoted, or NCCL's own choice"


def _flags(overrides: Iterable[Override]) -> npt.NDArray[np.bool_]:
    flags = np.zeros(len(Override), np.bool_)
    flags[[*overrides]] = True
    return flags


EXPLORING: Final = _flags({Override.experiment, Override.first_look, Override.trial, Override.provisional})
"""By override: nothing has spoken for what runs yet."""
CHARGED: Final = EXPLORING | _flags({Override.proven})
"""By override: calls are held against the incumbent's, and the budget pays for what they take longer."""
TENTATIVE: Final = EXPLORING | _flags({Override.variant})
"""By override: what must not run unwatched."""


class Setting(NamedTuple):
    """What runs at one key, and why."""

    candidate: Candidate
    why: Override


class Window(NamedTuple):
    """What is known of the next window before anything is decided at any key."""

    forced: Mapping[int, Setting] = {}
    """By key index: what an experiment or a variant asks for."""
    unmeasured: Collection[int] = ()
    """Keys whose trial gives way by itself after a first look."""
    is_overspent: bool = False
    """Only incumbents and what earlier jobs proved run."""


def what_runs(state: KeyState, window: Window) -> Setting:
    """The first of `Override` that applies at a key whose window has begun; control windows are whole plans."""
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
    """What runs at a key when nothing is forced, on trial or resting."""
    if state.provisional is None:
        return Setting(state.incumbent, Override.incumbent)
    return Setting(state.provisional, Override.proven if state.provisional_is_proven else Override.provisional)


CONTROL: Final = Setting(BASELINE, Override.control)
