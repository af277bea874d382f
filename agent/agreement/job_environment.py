"""All ranks of a job start with the proposed variables, or none does: rank 0 proposes, each rank votes, one answer.

It happens before the first communicator is made, on every node that was launched with `--tune-environment`. No rank
waits longer than `PATIENCE_S`. A rank that gives up writes NO, unless an answer is written already, and obeys it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from .exchange import Closed, Exchange
from .job_start import begin_incarnation, compare, join
from .protocol import framed, frames

PATIENCE_S: Final = 60.0
FORMAT: Final = "environment 1"
"""Version of this exchange, which must be equal on all ranks."""
PROPOSAL, VOTES, OBJECTION, ANSWER = "proposal", "votes", "objection", "answer"
YES, NO = b"yes", b"no"
LATE: Final = "not all ranks came in time; launch all nodes with --tune-environment"


class Agreed(NamedTuple):
    """The result of the vote."""

    variables: str
    """`NAME=VALUE` separated by spaces; empty: no variables."""
    why_not: str = ""
    """Why the proposal was refused, if this rank knows."""


def agree(
    exchange: Exchange,
    rank: int,
    world_size: int,
    proposal: str,
    objection: Callable[[str], str],
    remember: Callable[[int, str], bool],
    patience_s: float = PATIENCE_S,
) -> Agreed:
    """Vote on rank 0's proposal; all ranks call this once, and get the same `variables`.

    Args:
        exchange: for this purpose alone.
        proposal: as `Agreed.variables`; ignored on ranks other than 0.
        objection: why this rank cannot take a proposal; empty: it can.
        remember: called on rank 0 with the number of the start and the variables that will be in force. It returns
            whether the daemon has recorded them for the comparison of jobs.

    Raises:
        RuntimeError: the job's store is gone.
    """
    timer = threading.Timer(patience_s, exchange.close)
    timer.daemon = True
    timer.start()
    try:
        if rank:
            _, alike = join(exchange, rank, world_size, FORMAT)
            return _follow(exchange, rank, objection) if alike else Agreed("", "ranks have different versions")
        number = begin_incarnation(exchange)
        if not compare(exchange, world_size, FORMAT):
            return Agreed("", "ranks have different versions")
        return _lead(exchange, world_size, proposal, objection, lambda found: remember(number, found))
    except Closed:
        return Agreed("", LATE)
    finally:
        timer.cancel()


def _lead(
    exchange: Exchange,
    world_size: int,
    proposal: str,
    objection: Callable[[str], str],
    remember: Callable[[str], bool],
) -> Agreed:
    exchange.set(PROPOSAL, proposal.encode())
    why_not = objection(proposal)
    try:
        exchange.wait_until(lambda: len(frames(exchange.read(VOTES) or b"")) >= world_size - 1)
        if not all(vote == YES for vote in frames(exchange.read(VOTES) or b"").values()):
            why_not = why_not or (exchange.read(OBJECTION) or b"").decode(errors="replace")
    except Closed:
        why_not = LATE
    wanted = "" if why_not else proposal
    if not remember(wanted) and wanted:
        wanted, why_not = "", "no daemon answers that could remember how it went"
    if wanted and exchange.set_once(ANSWER, YES) != YES:  # a rank has given up by now
        remember("")
        wanted, why_not = "", LATE
    elif not wanted:
        exchange.set_once(ANSWER, NO)
    return Agreed(wanted, why_not)


def _follow(exchange: Exchange, rank: int, objection: Callable[[str], str]) -> Agreed:
    exchange.wait_until(lambda: exchange.read(PROPOSAL) is not None)
    proposal = (exchange.read(PROPOSAL) or b"").decode(errors="replace")
    why_not = objection(proposal)
    if why_not:
        exchange.set_once(OBJECTION, why_not.encode())
    exchange.append(VOTES, framed(rank, NO if why_not else YES))
    try:
        exchange.wait_until(lambda: exchange.read(ANSWER) is not None)
        answer = exchange.read(ANSWER)
    except Closed:
        answer = exchange.set_once(ANSWER, NO)
    return Agreed(proposal if answer == YES else "", why_not)
