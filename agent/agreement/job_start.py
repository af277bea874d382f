"""How a job starts: which start is it, and do all ranks have equal versions?

A restarted job may find the store that its last start left behind, and launchers number starts differently on different
nodes. So rank 0 numbers them in the store: an *incarnation* is one start of rank 0, and all further keys lie below its
number. A rank may read an old number first; it must find out, and never mistake the dead ranks' keys for its peers'.

So each rank counts itself in the incarnation, under its fingerprint and in all. Only rank 0 says that all are here, and
whether they are alike. In an old incarnation rank 0 is dead: either it never said so, or it did and the count is full,
which a newcomer sees. It happens in the background: with a rank missing it never ends, and training runs untuned.
"""

from __future__ import annotations

import hashlib

from zerotune.agent.agreement.exchange import Exchange

N_INCARNATIONS_KEY = "n_incarnations"
INCARNATION_KEY = "incarnation"
ALIKE = b"alike"
DIFFERENT = b"different"
# The keys below `muster/` keep that name, so that ranks of other versions are found to differ.


def found_incarnation(exchange: Exchange) -> int:
    """Rank 0: begin a new incarnation; further keys of `exchange` are its own."""
    number = exchange.add(N_INCARNATIONS_KEY)
    exchange.set(INCARNATION_KEY, str(number).encode())
    exchange.set(_begun_key(number), b"1")
    exchange.enter(str(number))
    return number


def compare(exchange: Exchange, world_size: int, fingerprint: str) -> bool:
    """Rank 0, after `found_incarnation`: wait for all ranks and tell them whether they are alike.

    Args:
        exchange: in the folder of this incarnation.
        world_size: ranks of the job.
        fingerprint: rank 0's own; what must be equal on all ranks.

    Returns:
        Whether all ranks came with this `fingerprint`.

    Raises:
        Closed: the agreement was closed before all ranks came.
    """
    exchange.add(member_key(fingerprint))
    exchange.add(all_key(world_size))
    exchange.wait_until(lambda: exchange.add(all_key(world_size), 0) >= world_size)
    is_alike = exchange.add(member_key(fingerprint), 0) == world_size
    exchange.set(answer_key(world_size), ALIKE if is_alike else DIFFERENT)
    return is_alike


def join(exchange: Exchange, world_size: int, fingerprint: str) -> tuple[int, bool]:
    """The others: find the current incarnation, and be counted in it.

    Args:
        exchange: at the top of the store; afterwards in the folder of the incarnation.
        world_size: ranks of the job.
        fingerprint: this rank's own; what must be equal on all ranks.

    Returns:
        The incarnation, and whether all its ranks came with one fingerprint.

    Raises:
        Closed: the agreement was closed before all ranks came.
    """
    number = 0
    while True:
        number = _read_number(exchange, above=number)
        exchange.enter(str(number))
        exchange.add(member_key(fingerprint))
        is_full = exchange.add(all_key(world_size)) > world_size
        answer = None if is_full else _await_answer(exchange, world_size, number)
        if answer is not None:
            return number, answer == ALIKE


def all_key(world_size: int) -> str:
    """Where ranks are counted; a job that restarts with another number of ranks counts elsewhere."""
    return f"muster/{world_size}/all"


def answer_key(world_size: int) -> str:
    """Where rank 0 says whether all are alike."""
    return f"muster/{world_size}/verdict"


def member_key(fingerprint: str) -> str:
    """Where the ranks of one fingerprint are counted."""
    return "muster/" + hashlib.sha256(fingerprint.encode()).hexdigest()[:16]


def _begun_key(number: int) -> str:
    return f"incarnation/{number}"


def _read_number(exchange: Exchange, above: int) -> int:
    """The newest incarnation, once there is one after `above`."""
    exchange.enter("")
    exchange.wait_until(lambda: exchange.has(_begun_key(above + 1)))
    return int(exchange.read(INCARNATION_KEY) or 0)  # written before the key that was waited for


def _await_answer(exchange: Exchange, world_size: int, number: int) -> bytes | None:
    """Rank 0's answer; None when a newer incarnation has begun instead."""

    def is_over() -> bool:
        return exchange.has(_begun_key(number + 1), everywhere=True)

    exchange.wait_until(lambda: exchange.has(answer_key(world_size)) or is_over())
    return None if is_over() else exchange.read(answer_key(world_size))
