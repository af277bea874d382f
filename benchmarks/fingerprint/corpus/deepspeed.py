"""The order in which DeepSpeed's ZeRO-3 gathers tensors, by its settings; the generator uses it.

A tensor is gathered before its use, and others ahead of their use in the same call. It is freed after its use unless it
is soon needed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Gathering:
    """The settings `stage3_*`, in elements."""

    persistence: int
    """param_persistence_threshold: smaller tensors stay whole everywhere, and are gathered after a step only."""
    prefetch: int
    """prefetch_bucket_size: at least this many are gathered ahead in one call; 0 = none."""
    max_live: int
    """max_live_parameters: nothing is gathered ahead beyond them."""
    max_reuse: int
    """max_reuse_distance: a tensor is kept if fewer are used until it is used again."""


def gathers(tensors: Sequence[int], uses: Sequence[int], how: Gathering) -> list[list[int]]:
    """The gathers that DeepSpeed's ZeRO-3 enqueues in one pass.

    Args:
        tensors: elements of each tensor.
        uses: indices of `tensors` in the order in which forward and backward use them.

    Returns:
        Elements of each call, as one list before any use and one per use.
    """
    large = [n if n >= how.persistence else 0 for n in tensors]
    passed = [0, *accumulate(tensors[one] for one in uses)]
    again = _next_uses(uses)
    queue = deque(enumerate(uses))
    live: set[int] = set()
    seen_until = [-1] * len(tensors)
    """By tensor: its last use up to which tensors were gathered ahead; -1 = none."""
    n_live = 0

    def ahead() -> list[int]:
        n_ahead, most = 0, min(how.max_live - n_live, how.prefetch)
        while queue and n_ahead < most:
            at, one = queue.popleft()
            seen_until[one] = at
            if one not in live:
                live.add(one)
                n_ahead += large[one]
        return [n_ahead] if n_ahead else []

    calls = [ahead()]
    n_live += sum(calls[0])
    for step, one in enumerate(uses):
        now = [large[one]] if one not in live and large[one] else []
        live.add(one)
        n_live += sum(now)
        if seen_until[one] < step:
            seen_until[one], _ = queue.popleft()
        more = ahead()
        n_live += sum(more)
        calls.append(now + more)
        is_soon = again[step] and passed[again[step]] - passed[step + 1] < how.max_reuse
        if not is_soon and seen_until[one] <= step + 1:
            live.discard(one)
            n_live -= large[one]
    return calls


def _next_uses(uses: Sequence[int]) -> list[int]:
    """For each use, the next one of the same tensor; 0 = none."""
    found, last = [0] * len(uses), dict[int, int]()
    for step in range(len(uses) - 1, -1, -1):
        found[step] = last.get(uses[step], 0)
        last[uses[step]] = step
    return found
