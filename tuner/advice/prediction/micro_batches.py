"""A training step as programs of the simulator: what is issued when, and what waits for what.

Stage 3 asks for the gather of block i when block i - `prefetch` begins to compute, as FSDP2 and zero_runtime do. With a
prefetch of 0 it asks when the block before is done. Backward keeps the last block, which is still whole. Gathers and
reductions share the network in the order of their issue; replicas' all-reduces (hybrid sharding) run on other links.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from zerotune.tuner.advice.prediction.timeline import Op, OpKind, Program, StreamCall

KINDS: Final = ("forward", "backward", "optimizer")
"""Of computation, by an operation's `at`."""
STREAMS: Final = ("network", "replicas")
_NETWORK, _REPLICAS = range(2)
_FORWARD, _BACKWARD, _OPTIMIZER = range(3)


class Pieces(NamedTuple):
    """Seconds of what one step is made of."""

    forward_s: float
    """Of one block, as all others."""
    backward_s: float
    gather_s: float
    """Of one block; 0: parameters are whole."""
    reduce_s: tuple[tuple[float, float], ...]
    """What leaves after the backward of each block, last block first: among shards, then among replicas."""
    outer_gather_s: float
    """Of embeddings and head."""
    outer_reduce_s: tuple[float, float]
    loss_s: tuple[float, float]
    """Forward and backward of head and loss."""
    optimizer_s: float
    post_gather_s: float
    """Of stages 1 and 2, after the optimizer; or, if it overlaps, beside the next forward."""


class Part(NamedTuple):
    """A micro-batch as a program, and what its calls are: `gather` or `reduce`."""

    program: Program[StreamCall]
    kinds: tuple[str, ...]


class _Builder:
    def __init__(self, skew_s: float) -> None:
        self.skew_us = 1e6 * skew_s
        self.calls: list[StreamCall] = []
        self.kinds: list[str] = []
        self.ops: list[Op] = []

    def compute(self, kind: int, seconds: float) -> None:
        if seconds:
            self.ops.append(Op(OpKind.compute, kind, 1e6 * seconds))

    def issue(self, kind: str, seconds: float, *, late: bool = True, stream: int = _NETWORK, after: int = -1) -> int:
        """Ask for a collective, which begins `late` by the ranks' skew; its number, or -1: it takes no time."""
        if not seconds:
            return -1
        at = len(self.calls)
        self.calls.append(StreamCall(stream, 1e6 * seconds, skew_us=self.skew_us if late else 0.0, after=after))
        self.kinds.append(kind)
        self.ops.append(Op(OpKind.issue, at))
        return at

    def reduce(self, seconds: tuple[float, float]) -> None:
        """Gradients leave: among the ranks that share the states, then among replicas."""
        at = self.issue("reduce", seconds[0])
        self.issue("reduce", seconds[1], late=False, stream=_REPLICAS, after=at)

    def wait(self, *calls: int) -> None:
        self.ops.extend(Op(OpKind.wait, at) for at in calls if at >= 0)

    def wait_for_all(self) -> None:
        self.wait(*{call.stream: at for at, call in enumerate(self.calls)}.values())


def micro_batch(
    pieces: Pieces,
    n_blocks: int,
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
        n_blocks: of the model.
        prefetch: blocks gathered ahead.
        skew_s: from a rank's asking until a collective begins.
        overlaps: it begins with the gathers that follow the optimizer step before.
        reduces: its gradients are reduced.
        optimizer_s: of the optimizer step that follows; None: another micro-batch does.
        post_gather_s: of the gathers that follow the optimizer step.

    Returns:
        The program.
    """
    built = _Builder(skew_s)

    def gather() -> int:
        return built.issue("gather", pieces.gather_s)

    if overlaps:
        share_s = pieces.post_gather_s / n_blocks
        ready = [built.issue("gather", share_s, late=False) for _ in range(n_blocks)]
    outer = built.issue("gather", pieces.outer_gather_s, late=False)
    if not overlaps:
        ready = [] if prefetch else [gather()]
        built.wait(outer)
        ready += [gather() for _ in range(min(prefetch, n_blocks))]
    for at in range(n_blocks):
        if at == len(ready):
            ready.append(gather())
        built.wait(outer, ready[at])
        if prefetch and at + prefetch < n_blocks and not overlaps:
            ready.append(gather())
        built.compute(_FORWARD, pieces.forward_s)
    built.compute(_FORWARD, pieces.loss_s[0])
    ready = [-1, *(gather() for _ in range(min(prefetch, n_blocks - 1)))]
    built.compute(_BACKWARD, pieces.loss_s[1])
    for at in range(n_blocks):
        if prefetch == 0 and at:
            ready.append(gather())
        built.wait(ready[at])
        if prefetch and at + prefetch < n_blocks - 1:
            ready.append(gather())
        built.compute(_BACKWARD, pieces.backward_s)
        if reduces:
            built.reduce(pieces.reduce_s[at])
    if reduces:
        built.reduce(pieces.outer_reduce_s)
    if optimizer_s is not None:
        built.wait_for_all()
        built.compute(_OPTIMIZER, optimizer_s)
        built.wait(built.issue("gather", post_gather_s, late=False))
    return Part(Program(tuple(built.calls), tuple(built.ops)), tuple(built.kinds))
