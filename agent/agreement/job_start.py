"""How a job starts: ranks find the number of this start, and whether all of them have equal versions.

A restarted job may find the store of its last start, and launchers number starts differently on different nodes. So
rank 0 numbers the starts in the store. An *incarnation* is one start of rank 0; all further keys lie below its number.
A rank may read an old number first. It must detect that, and never take the keys of dead ranks for those of its peers.

So each process of a rank but 0 registers its rank in the incarnation: once, by compare-and-set, with its own token. If
another process has registered that rank, the incarnation is an old one. Registered ranks append their fingerprints.
Only rank 0 announces that all ranks are here, and whether their fingerprints are equal. In an old incarnation rank 0 is
dead. Either it never announced that, or all ranks are registered, which a new process sees. Requests may be repeated.
All this happens in the background: if a rank is missing it never ends, and training runs untuned.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from .exchange import Exchange
from .protocol import framed, frames

N_INCARNATIONS_KEY = "n_incarnations"
INCARNATION_KEY = "incarnation"
POLL_S_PER_RANK: Final = 1e-4
"""Time between polls for rank 0's answer, per rank: all ranks send the store at most 20,000 requests a second."""
ALIKE = b"alike"
DIFFERENT = b"different"


def begin_incarnation(exchange: Exchange) -> int:
    """Rank 0: begin a new incarnation; further keys of `exchange` lie in it."""
    number = exchange.add(N_INCARNATIONS_KEY)
    exchange.set(INCARNATION_KEY, str(number).encode())
    exchange.enter(str(number))
    return number


def compare(exchange: Exchange, world_size: int, fingerprint: str) -> bool:
    """Rank 0, after `begin_incarnation`: wait for all ranks and announce whether they all have its `fingerprint`.

    Raises:
        Closed: the agreement was closed before all ranks were here.
    """
    exchange.append(fingerprints_key(world_size), fingerprint_frame(0, fingerprint))

    def found() -> dict[int, bytes]:
        return frames(exchange.read(fingerprints_key(world_size)) or b"")

    exchange.wait_until(lambda: len(found()) >= world_size)
    is_alike = len({*found().values()}) == 1
    exchange.set(answer_key(world_size), ALIKE if is_alike else DIFFERENT)
    return is_alike


def join(
    exchange: Exchange, rank: int, world_size: int, fingerprint: str, token: bytes | None = None
) -> tuple[int, bool]:
    """Ranks other than 0: find the current incarnation, and register this rank in it.

    Returns the incarnation, and whether all its ranks have the same fingerprint.

    Args:
        exchange: at the top of the store; afterwards in the folder of the incarnation.
        token: of this process; None: a random one.

    Raises:
        Closed: the agreement was closed before all ranks were here.
    """
    token, number = token or secrets.token_bytes(16), 0
    while True:
        number = _newest(exchange, above=number)
        exchange.enter(str(number))
        if exchange.set_once(rank_key(world_size, rank), token) != token:
            continue
        exchange.append(fingerprints_key(world_size), fingerprint_frame(rank, fingerprint))
        answer = _await_answer(exchange, world_size, number)
        if answer is not None:
            return number, answer == ALIKE


def rank_key(world_size: int, rank: int) -> str:
    """The key for the token of this rank's process. A restart with another number of ranks has other keys."""
    return f"members/{world_size}/{rank}"


def fingerprints_key(world_size: int) -> str:
    """The key to which all ranks append their fingerprints."""
    return f"members/{world_size}/fingerprints"


def answer_key(world_size: int) -> str:
    """The key where rank 0 writes whether all ranks are alike."""
    return f"members/{world_size}/answer"


def fingerprint_frame(rank: int, fingerprint: str) -> bytes:
    """The bytes that a rank appends to `fingerprints_key`."""
    return framed(rank, hashlib.sha256(fingerprint.encode()).digest()[:8])


def _incarnation(exchange: Exchange) -> int:
    return int(exchange.read(INCARNATION_KEY, everywhere=True) or 0)


def _newest(exchange: Exchange, above: int) -> int:
    """The newest incarnation, once its number is higher than `above`."""
    exchange.wait_until(lambda: _incarnation(exchange) > above)
    return _incarnation(exchange)


def _await_answer(exchange: Exchange, world_size: int, number: int) -> bytes | None:
    """Rank 0's answer; None if a newer incarnation has begun instead."""
    key = answer_key(world_size)
    exchange.wait_until(
        lambda: exchange.read(key) is not None or _incarnation(exchange) > number, POLL_S_PER_RANK * world_size
    )
    return None if _incarnation(exchange) > number else exchange.read(key)
