"""All interleavings of a job's start with the production's functions, on a store that a dead start left behind.

A function is run anew for each of its requests, with the answers that it had so far: so every request is an action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from zerotune.agent.agreement import job_start

Answers = tuple[Any, ...]


class NextRequest(Exception):
    """The function has used up its answers."""


class Blocked(Exception):
    """What is waited for is not so yet."""


class ScriptedExchange:
    """Gives the answers so far, then takes one request to the store."""

    def __init__(self, store: dict[str, Any], answers: Answers, *, sends_twice: bool = False) -> None:
        self.store, self.answers, self.at, self.folder, self.sends_twice = store, answers, 0, "", sends_twice
        self.fresh: Any = None

    def enter(self, folder: str) -> None:
        self.folder = f"{folder}/" if folder else ""

    def request(self, send: Any) -> Any:
        if self.at < len(self.answers):
            self.at += 1
            return self.answers[self.at - 1]
        if self.fresh is not None:
            raise NextRequest
        if self.sends_twice:  # the first answer was lost
            send()
        self.fresh = (send(),)
        return self.fresh[0]

    def add(self, key: str, amount: int = 1) -> int:
        def send() -> int:
            self.store[self.folder + key] = self.store.get(self.folder + key, 0) + amount
            return self.store[self.folder + key]

        return self.request(send)

    def set(self, key: str, value: bytes) -> None:
        self.request(lambda: self.store.__setitem__(self.folder + key, value))

    def set_once(self, key: str, value: bytes) -> bytes:
        return self.request(lambda: self.store.setdefault(self.folder + key, value))

    def append(self, key: str, value: bytes) -> None:
        self.request(
            lambda: self.store.__setitem__(self.folder + key, self.store.get(self.folder + key, b"") + value)
        )

    def read(self, key: str, *, everywhere: bool = False) -> bytes | None:
        return self.request(lambda: self.store.get(key if everywhere else self.folder + key))

    def wait_until(self, is_so: Any, _: float = 0.0) -> None:
        """Looks that find nothing are not remembered; what one look asks is asked at once."""
        before, fresh = self.at, self.fresh
        if before < len(self.answers):
            self.at += 1
            return
        if fresh is not None:
            raise NextRequest
        self.fresh = (None,)
        probe = ScriptedExchange(self.store, ())
        probe.folder, probe.request = self.folder, lambda send: send()  # type: ignore[method-assign]
        self.read = probe.read  # type: ignore[method-assign]
        found = is_so()
        del self.read
        if not found:
            raise Blocked


@dataclass(frozen=True)
class Rank:
    rank: int
    world_size: int
    fingerprint: str
    token: bytes
    answers: Answers = ()
    result: Any = None


def advanced(rank: Rank, store: dict[str, Any], *, sends_twice: bool) -> Rank | None:
    """The rank after its next request; None: it can do nothing now."""
    exchange: Any = ScriptedExchange(store, rank.answers, sends_twice=sends_twice)
    try:
        if rank.rank == 0:
            number = job_start.begin_incarnation(exchange)
            result: Any = (number, job_start.compare(exchange, rank.world_size, rank.fingerprint))
        else:
            result = job_start.join(exchange, rank.rank, rank.world_size, rank.fingerprint, rank.token)
    except NextRequest:
        result = None
    except Blocked:
        return None
    return replace(rank, answers=(*rank.answers, *exchange.fresh), result=result)


def ends(store: dict[str, Any], ranks: tuple[Rank, ...], *, sends_twice: bool = False) -> tuple[set[Any], list[Any]]:
    """(Results of all ranks, in states in which nobody can go on; all states of the store on the way)."""
    start = (tuple(sorted(store.items())), ranks)
    met, left, results = {start}, [start], set()
    while left:
        items, now = left.pop()
        is_over = True
        for place, rank in enumerate(now):
            changed = dict(items)
            after = None if rank.result is not None else advanced(rank, changed, sends_twice=sends_twice)
            if after is None:
                continue
            is_over = False
            state = (tuple(sorted(changed.items())), (*now[:place], after, *now[place + 1 :]))
            if state not in met:
                met.add(state)
                left.append(state)
        if is_over:
            results.add(tuple(rank.result for rank in now))
    return results, [dict(items) for items in {items for items, _ in met}]


def job(*fingerprints: str, token: bytes) -> tuple[Rank, ...]:
    return tuple(Rank(rank, len(fingerprints), each, token) for rank, each in enumerate(fingerprints))


@pytest.mark.parametrize("sends_twice", [False, True])
@pytest.mark.parametrize(("fingerprints", "is_alike"), [("aa", True), ("aaa", True), ("aab", False), ("baa", False)])
def test_all_ranks_learn_the_same_of_a_first_start(fingerprints: str, is_alike: bool, sends_twice: bool) -> None:
    number = 1 + sends_twice  # which says no more than that it is another start
    found = ends({}, job(*fingerprints, token=b"first"), sends_twice=sends_twice)[0]
    assert found == {((number, is_alike),) * len(fingerprints)}


def test_with_a_rank_missing_nobody_is_told_anything() -> None:
    assert ends({}, job(*"aaa", token=b"first")[:2])[0] == {(None, None)}


@pytest.mark.parametrize("before", ["aa", "aaa"])
@pytest.mark.parametrize("after", ["aa", "bb"])
def test_a_start_never_takes_the_last_one_for_its_own(before: str, after: str) -> None:
    """Whatever moment the last start died at, and however many ranks it had."""
    leftovers = ends({}, job(*before, token=b"first"))[1]
    assert len(leftovers) >= 8
    for store in leftovers:
        number = store.get(job_start.N_INCARNATIONS_KEY, 0) + 1
        assert ends(store, job(*after, token=b"second"))[0] == {((number, True),) * len(after)}


def test_a_rank_that_does_not_see_that_another_process_was_it_takes_the_dead_for_its_peers() -> None:
    """The mutant of this model."""
    leftovers = ends({}, job(*"aa", token=b"same"))[1]
    found = {result for store in leftovers for result in ends(store, job(*"aa", token=b"same"))[0]}
    assert any(None in each or each[0][0] != each[1][0] for each in found)
