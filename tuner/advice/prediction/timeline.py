"""Streams of one rank: computation, its shards' network, its replicas'; what waits for what in a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

STREAMS: Final = ("compute", "network", "replicas")


class Span(NamedTuple):
    """Something at work; seconds from the step's begin."""

    stream: str
    """`compute`, `network` (gathers and reductions), or `replicas` (hybrid sharding's all-reduces, on other links)."""
    kind: str
    """`forward`, `backward`, `gather`, `reduce`, `optimizer`."""
    begin_s: float
    end_s: float


class Timeline:
    """Spans in the order in which they were queued; a stream runs one at a time."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s
        """From a rank's asking until a collective begins."""
        self.spans: list[Span] = []
        self.free_s = dict.fromkeys(STREAMS, 0.0)
        self.busy_s = dict.fromkeys(STREAMS, 0.0)

    def run(self, stream: str, kind: str, seconds: float, not_before_s: float = 0.0) -> tuple[float, float]:
        """Queue something.

        Args:
            stream: one of STREAMS.
            kind: as in `Span`.
            seconds: that it takes.
            not_before_s: what it waits for.

        Returns:
            When it begins and ends.
        """
        begin = max(self.free_s[stream], not_before_s)
        end = begin + seconds
        self.free_s[stream] = end
        self.busy_s[stream] += seconds
        if seconds > 0:
            self.spans.append(Span(stream, kind, begin, end))
        return begin, end

    @property
    def end_s(self) -> float:
        """When all is done."""
        return max(self.free_s.values())


class BlockSteps(NamedTuple):
    """Seconds of one block in one micro-batch."""

    forward_s: float
    backward_s: float
    gather_s: float
    """0: parameters are whole."""
    reduce_s: tuple[float, ...]
    """What leaves for the network after the backward of each block, last block first; shape (blocks,)."""
    replicate_s: tuple[float, ...]
    """What the sum over replicas takes, which follows it; shape (blocks,)."""


def micro_batch(
    line: Timeline,
    block: BlockSteps,
    n_blocks: int,
    prefetch: int,
    first_s: float,
    last_s: tuple[float, float],
    ready_s: Sequence[float] = (),
) -> None:
    """Forward and backward of one micro-batch.

    Stage 3 asks for the gather of block i when block i - `prefetch` begins to compute, as FSDP2 and zero_runtime do;
    with 0, when the block before it is done. Backward keeps the last block, which is still whole. Gathers and
    reductions share the network in the order in which they are asked for.

    Args:
        line: what is extended.
        block: of each block.
        n_blocks: of the model.
        prefetch: blocks gathered ahead.
        first_s: gather of embeddings and head.
        last_s: forward and backward of head and loss.
        ready_s: of stages 1 and 2, when each block's updated parameters are there; shape (blocks,).
    """
    now = line.free_s["compute"]
    _, now = line.run("network", "gather", first_s, now) if first_s else (now, now)
    ready = list(ready_s) or [_gathered(line, block.gather_s, now) for _ in range(min(prefetch, n_blocks))]
    for i in range(n_blocks):
        if i == len(ready):
            ready.append(_gathered(line, block.gather_s, line.free_s["compute"]))
        begin, _ = line.run("compute", "forward", block.forward_s, max(ready[i], now))
        if prefetch and i + prefetch < n_blocks and not ready_s:
            ready.append(_gathered(line, block.gather_s, begin))
    line.run("compute", "forward", last_s[0])
    begin, _ = line.run("compute", "backward", last_s[1])
    ready = [begin]
    ready += [_gathered(line, block.gather_s, begin) for _ in range(min(prefetch, n_blocks - 1))]
    for i in range(n_blocks):
        if prefetch == 0 and i:
            ready.append(_gathered(line, block.gather_s, line.free_s["compute"]))
        begin, end = line.run("compute", "backward", block.backward_s, ready[i])
        if prefetch and i + prefetch < n_blocks - 1:
            ready.append(_gathered(line, block.gather_s, begin))
        reduce(line, block.reduce_s[i], block.replicate_s[i], end)


def reduce(line: Timeline, scatter_s: float, replicate_s: float, ready_s: float) -> None:
    """Gradients leave: among the ranks that share the states, then among replicas.

    Args:
        line: what is extended.
        scatter_s: the first takes.
        replicate_s: the second takes.
        ready_s: when the gradients are there.
    """
    done = line.run("network", "reduce", scatter_s, ready_s + line.skew_s)[1] if scatter_s else ready_s
    if replicate_s:
        line.run("replicas", "reduce", replicate_s, done)


def _gathered(line: Timeline, seconds: float, asked_s: float) -> float:
    return line.run("network", "gather", seconds, asked_s + line.skew_s)[1] if seconds else asked_s
