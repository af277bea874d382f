"""Builds a training step as programs of the simulator.

Stage 3 issues the gather of block i when block i - `prefetch` begins to compute, as in FSDP2 and zero_runtime. With a
prefetch of 0, it waits for the previous block. Backward keeps the last block, which is still whole. Gathers and
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
    """Seconds of the parts of one step."""

    forward_s: float
    """Forward time of one block; all blocks are equal."""
    backward_s: float
    gather_s: float
    """Gather time of one block; 0: parameters are whole."""
    reduce_s: tuple[tuple[float, float], ...]
    """Gradients that each block sends after its backward, last block first: among shards, then among replicas."""
    outer_gather_s: float
    """Gather time of embeddings and head."""
    outer_reduce_s: tuple[float, float]
    loss_s: tuple[float, float]
    """Forward and backward of head and loss."""
    optimizer_s: float
    post_gather_s: float
    """Of stages 1 and 2, after the optimizer; or, if it overlaps, beside the next forward."""


class Part(NamedTuple):
    """A micro-batch as a program, with its calls' durations and kinds: `gather` or `reduce`."""

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
    """Forward and backward of one micro-batch, which gathers `prefetch` blocks ahead.

    If it `overlaps`, it begins with the gathers that follow the previous optimizer step. Without `optimizer_s`, another
    micro-batch follows. `skew_s` is the time from a rank's issue of a collective to its beginning.
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
    """(calls, operations, number of each call) of a micro-batch without durations; cached, as a search has few.

    Parts with `is_there` False take no time, and are left out.
    """
    calls: list[StreamCall] = []
    ops: list[Op] = []
    numbers: list[int] = []

    def compute(at: int) -> None:
        ops.append(Op(OpKind.compute, at))

    def issue(number: int, *, late: bool = True, stream: int = 0, after: int = -1) -> int:
        """Issue a collective, which begins `late` by the ranks' skew; returns its index, or -1 if it takes no time."""
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
