"""Which collectives could not be timed since NCCL told times of others, in words."""

from __future__ import annotations

from collections.abc import Iterator

from zerotune.store.counted import counted
from zerotune.store.passages import Passages


def mistimed(passages: Passages) -> Iterator[str]:
    """A sentence with the remedy; none where no times were left out."""
    if n := passages.n_impossible_times:
        yield (
            f"NCCL told {counted(n, 'collective')} the times of other calls, which are left out: from 2.31 on it"
            " counts wrongly behind calls that it tells no profiler of, such as broadcasts; take NCCL 2.30 or older"
        )
