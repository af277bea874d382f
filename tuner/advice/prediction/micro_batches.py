"""A training step as programs of the simulator: what is issued when, and what waits for what.

Stage 3 asks for the gather of block i when block i - `prefetch` begins to compute, as FSDP2 and zero_runtime do. With a
prefetch of 0 it asks when the block before is done. Backward keeps the last block, which is still whole. Gathers and
reductions share the network in the order of their issue; replicas' all-reduces (hybrid sharding) run on other links.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from .timeline import Op, OpKind, Program, StreamCall

KINDS: Final = ("forward", "backward", "optimizer", "forward", "backward")
"""Of computation, by an operation's `at`: of a block, of a block, of the optimizer, of the loss, of the loss."""
STREAMS: Final = ("network", "replicas")
_FORWARD, _BACKWARD, _OPTIMIZER, _LOSS_FORWARD, _LOSS_BACKWARD = range(5)
_GATHER, _OUTER_GATHER, _POST_GATHER, _SHARE_OF_POST_GATHER, _OUTER_REDUCE = range(5)
"""Collectives by number; `_OUTER_REDUCE` and all above it are reductions: among shards, then among replicas."""


class Pieces(NamedTuple):
    """Seconds of what one step is made of."""

    forward_s: float
    """Of one block, as all others."""
    backward_s: float
    gather_s: float
    """Of one block; 0: parameters are whole."""
    reduce_s: tuple[tuple[float, float], ...]
    """Gradients that each block sends after its backward, last block first: among shards, then among replicas."""
    outer_gather_s: float
    """Of embeddings and head."""
    outer_reduce_s: tuple[float, float]
    loss_s: tuple[float, float]
    """Forward and backward of head and loss."""
    optimizer_s: float
    post_gather_s: float
    """Of stages 1 and 2, after the optimizer; or, if it overlaps, beside the next forward."""


class Part(NamedTuple):
    """A micro-batch as a program, its calls' durations, and what they are: `gather` or `reduce`."""

    program: Program[StreamCall]
    durations_us: list[float]
    kinds: list[str]


def micro_batch(
    pieces: Pieces,
    prefetch: int,
    skew_s: float,
    *,
    overlaps: bool,
    reduces: bool,
    optimizer_s: float | None,
    post_gather_s: float,
) -> Part:
    """Forward and backward of one micro-batch.

    Args:
        pieces: what it is made of.
        prefetch: blocks gathered ahead.
        skew_s: from a rank's asking until a collective begins.
        overlaps: it begins with the gathers that follow the optimizer step before.
        reduces: its gradients are reduced.
        optimizer_s: of the optimizer step that follows; None: another micro-batch does.
        post_gather_s: of the gathers that follow the optimizer step.

    Returns:
        The program.
    """
    n_blocks = len(pieces.reduce_s)
    gathers = [pieces.gather_s, pieces.outer_gather_s, post_gather_s, pieces.post_gather_s / n_blocks]
    reductions = [seconds for pair in (pieces.outer_reduce_s, *pieces.reduce_s) for seconds in pair]
    us = [1e6 * one for one in (*gathers, *(reductions if reduces else [0.0] * len(reductions)))]
    compute_us = [
        1e6 * one
        for one in (pieces.forward_s, pieces.backward_s, optimizer_s or 0.0, pieces.loss_s[0], pieces.loss_s[1])
    ]
    is_there = tuple(one > 0 for one in us)
    calls, ops, numbers = _structure(n_blocks, prefetch, 1e6 * skew_s, overlaps, optimizer_s is not None, is_there)
    timed = tuple(Op(op.kind, op.at, compute_us[op.at]) if op.kind is OpKind.compute else op for op in ops)
    kinds = ["reduce" if number >= _OUTER_REDUCE else "gather" for number in numbers]
    return Part(Program(calls, timed), [us[number] for number in numbers], kinds)


@lru_cache(maxsize=256)
def _structure(
    n_blocks: int, prefetch: int, skew_us: float, overlaps: bool, last: bool, is_there: tuple[bool, ...]
) -> tuple[tuple[StreamCall, ...], tuple[Op, ...], tuple[int, ...]]:
    """(calls, operations, number of each call) of a micro-batch, whatever they take; a search asks for few of them.

    What `is_there` is False for takes no time, and is left out.
    """
    calls: list[StreamCall] = []
    ops: list[Op] = []
    numbers: list[int] = []

    def compute(at: int) -> None:
        ops.append(Op(OpKind.compute, at))

    def issue(number: int, *, late: bool = True, stream: int = 0, after: int = -1) -> int:
        """Ask for a collective, which begins `late` by the ranks' skew; its place, or -1: it takes no time."""
        if not is_there[number]:
            return -1
        ops.append(Op(OpKind.issue, len(calls)))
        calls.append(StreamCall(stream, 0.0, skew_us=skew_us if late else 0.0, after=after))
        numbers.append(number)
        return len(calls) - 1

    def reduce(number: int) -> None:
        issue(number + 1, late=False, stream=1, after=issue(number))

    def wait(at: int) -> None:
        if at >= 0:
            ops.append(Op(OpKind.wait, at))

    if overlaps:
        ready = [issue(_SHARE_OF_POST_GATHER, late=False) for _ in range(n_blocks)]
    else:
        outer = issue(_OUTER_GATHER, late=False)
        ready = [] if prefetch else [issue(_GATHER)]
        wait(outer)
        ready += [issue(_GATHER) for _ in range(min(prefetch, n_blocks))]
    for at in range(n_blocks):
        if at == len(ready):
            ready.append(issue(_GATHER))
        wait(ready[at])
        if prefetch and at + prefetch < n_blocks and not overlaps:
            ready.append(issue(_GATHER))
        compute(_FORWARD)
    compute(_LOSS_FORWARD)
    ready = [-1, *(issue(_GATHER) for _ in range(min(prefetch, n_blocks - 1)))]
    compute(_LOSS_BACKWARD)
    for at in range(n_blocks):
        if prefetch == 0 and at:
            ready.append(issue(_GATHER))
        wait(ready[at])
        if prefetch and at + prefetch < n_blocks - 1:
            ready.append(issue(_GATHER))
        compute(_BACKWARD)
        reduce(_OUTER_REDUCE + 2 * (at + 1))
    reduce(_OUTER_REDUCE)
    if last:
        for at in {call.stream: at for at, call in enumerate(calls)}.values():
            wait(at)
        compute(_OPTIMIZER)
        wait(issue(_POST_GATHER, late=False))
    return tuple(calls), tuple(ops), tuple(numbers)
