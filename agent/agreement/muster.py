"""Before anything else: are all ranks here, alike, and ready to stop where the first turn is?

No rank may wait at a boundary for ranks that never installed the agent, so it happens in steps, all in
the background and none of them bounded in time:

1. Each rank counts itself, under its fingerprint and in all. The last one to come says whether every
   rank had the same fingerprint.
2. Each rank that reads "alike" promises a boundary that it will not cross without knowing the first
   turn. By now all ranks are known to be there, so that this wait ends.
3. Rank 0 collects the promises and writes the first turn, at the furthest of them.

With a rank missing, step 1 never ends, and training runs untuned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from agent.agreement.exchange import Exchange
from agent.agreement.protocol import Turn, decode_turn

ALL_KEY = "muster/all"
VERDICT_KEY = "muster/verdict"
FIRST_TURN_KEY = "turn/first"
ALIKE = b"alike"
DIFFERENT = b"different"


def compare(exchange: Exchange, world_size: int, fingerprint: str) -> bool:
    """Step 1: True when all `world_size` ranks came with this `fingerprint`."""
    own_key = member_key(fingerprint)
    exchange.add(own_key)
    if exchange.add(ALL_KEY) == world_size:
        is_alike = exchange.add(own_key, 0) == world_size
        exchange.set(VERDICT_KEY, ALIKE if is_alike else DIFFERENT)
    return exchange.poll(VERDICT_KEY) == ALIKE


def announce_promise(exchange: Exchange, rank: int, boundary: int) -> None:
    """Step 2, after `Follower.promise`."""
    exchange.set(promise_key(rank), str(boundary).encode())


def write_first_turn(exchange: Exchange, world_size: int, first_turn: Callable[[list[int]], bytes]) -> None:
    """Step 3, on rank 0: `first_turn` makes the value from all promises."""
    promises = []
    for rank in range(world_size):
        promises.append(int(exchange.get(promise_key(rank))))
    exchange.set(FIRST_TURN_KEY, first_turn(promises))
    for rank in range(world_size):
        exchange.delete(promise_key(rank))


def read_first_turn(exchange: Exchange) -> Turn:
    """The first turn, on every rank."""
    return decode_turn(exchange.get(FIRST_TURN_KEY))


def member_key(fingerprint: str) -> str:
    """Where the ranks of one fingerprint are counted."""
    return "muster/" + hashlib.sha256(fingerprint.encode()).hexdigest()[:16]


def promise_key(rank: int) -> str:
    """Where a rank's promise is written."""
    return f"muster/promise/{rank}"
