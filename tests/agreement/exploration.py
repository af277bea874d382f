"""Visits every state of the model of a job under agreement, and names the actions that lead to a violation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from boundary_model import Action, Model
from boundary_state import State, Violation, again, shallow

from zerotune.store.errors import WireError


def _copy(state: State, touched: int | None) -> State:
    after = shallow(state)
    after.ranks = list(state.ranks)
    for index in range(len(after.ranks)) if touched is None else (touched,):
        after.ranks[index] = after.ranks[index].copy()
    after.leader = again(state.leader)
    after.store = dict(state.store)
    after.epochs = dict(state.epochs)
    return after


def explore(model: Model, max_states: int = 2_000_000) -> int:
    """Visit every reachable state (`reduced`: those that matter) and return their number.

    Raises:
        Violation: two ranks enqueued one call under different epochs, a rank waits for ever with the
            daemon silent, actions go round in a circle, or an offer was not adopted or given up in time.
    """
    numbers: dict[tuple[object, ...], int] = {}
    start = model.initial()
    is_open = {start.key(numbers): True}
    """Of each state met, whether what follows it is still being looked at."""
    path: list[_Visit] = [_Visit(start, "", start.key(numbers), iter(_next_actions(model, start, [])))]
    while path:
        visit = path[-1]
        action = next(visit.actions, None)
        if action is None:
            is_open[visit.key] = False
            path.pop()
            continue
        name, act, touched = action
        after = _copy(visit.state, touched)
        try:
            act(after)
        except (Violation, WireError) as violation:
            raise Violation(f"{violation}\n{_trail(path, name)}") from None
        key = after.key(numbers)
        if key not in is_open:
            is_open[key] = True
            path.append(_Visit(after, name, key, iter(())))
            path[-1].actions = iter(_next_actions(model, after, path))
        elif is_open[key]:
            raise Violation(f"actions go round in a circle\n{_trail(path, name)}")
        if len(is_open) > max_states:
            raise RuntimeError(f"more than {max_states} states")
    return len(is_open)


@dataclass
class _Visit:
    state: State
    name: str
    """Of the action that led here."""
    key: tuple[object, ...]
    actions: Iterator[Action]


def _next_actions(model: Model, state: State, path: list[_Visit]) -> list[Action]:
    found = model.persistent_set(state) if model.bounds.reduced else None
    return _all_actions(model, state, path) if found is None else found


def _all_actions(model: Model, state: State, path: list[_Visit]) -> list[Action]:
    inside = list(model.actions(state))
    surrenders = list(model.surrenders(state, is_quiet=not inside))
    if not inside and not surrenders and not model.is_final(state):
        raise Violation(f"all ranks wait, and no daemon can be waited for\n{_trail(path)}")
    epochs = {rank.follower.epoch for rank in state.ranks}
    if not inside and not model.is_failed(state) and model.bounds.skips_boundary is None and len(epochs) > 1:
        raise Violation(f"ranks end under epochs {sorted(epochs)}\n{_trail(path)}")
    return [*inside, *surrenders, *model.outside_actions(state)]


def _trail(path: list[_Visit], *last: str) -> str:
    return "\n".join((*(visit.name for visit in path), *last))
