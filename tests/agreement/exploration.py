"""Visits every state of the model of a job under agreement, and names the actions that lead to a violation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from change_model import Action, Model, State, Violation


@dataclass
class _Visit:
    state: State
    name: str
    actions: Iterator[Action]


def explore(model: Model, max_states: int = 2_000_000, ends: set[Any] | None = None) -> int:
    """Visit every reachable state and return their number.

    Args:
        model: of the job.
        max_states: more than that are a mistake of the bounds.
        ends: takes what calls ran under, of each state in which all is over.

    Raises:
        Violation: two ranks ran one call under different plans, a rank waits for ever or for training, an offer did not
            come into force though nothing failed for good, or a rank could not follow.
    """
    start = model.initial()
    met = {start.key()}
    path = [_Visit(start, "", _actions(model, start, ends))]
    while path:
        visit = path[-1]
        try:
            action = next(visit.actions, None)
            if action is None:
                path.pop()
                continue
            name, act, touched = action
            after = visit.state.copied(touched)
            after.n_failures += name.endswith("!")
            act(after)
            key = after.key()
            if key in met:
                continue
            met.add(key)
            if any(its.doing == "await" for its in after.ranks):
                model.check_waiting(after)
        except Violation as violation:
            trail = [*(each.name for each in path), name if action else "the end"]
            raise Violation(f"{violation}\n" + "\n".join(trail)) from None
        if len(met) > max_states:
            raise RuntimeError(f"more than {max_states} states")
        path.append(_Visit(after, name, _actions(model, after, ends)))
    return len(met)


def _actions(model: Model, state: State, ends: set[Any] | None) -> Iterator[Action]:
    inside = [*model.actions(state)] or [*model.clocks(state)]
    if not inside:
        over = state.copied(None)
        model.check_end(over)
        if ends is not None:
            ends.add(tuple(its.plugin.key() for its in over.ranks))
    yield from inside
    yield from model.failures(state)
