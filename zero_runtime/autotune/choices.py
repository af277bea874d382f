"""What a step can be run with, and in which order that is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

FINEST: Final = 16
"""A bucket is at most cut into so many chunks: each costs a call, and a place in the layout."""
DEEPEST: Final = 3
"""Layers gathered ahead: one more hides nothing that three did not hide, and costs memory."""


class StepSettings(NamedTuple):
    """What may change between steps without changing a bit of what is trained."""

    bucket_bytes: int
    prefetch: int
    variant: int = 0
    """Which of `communicator_variants` gathers run on, counted from 1; 0: the usual communicator."""


@dataclass(frozen=True)
class Choices:
    """Every bucket and depth that may run.

    buckets_bytes: ascending. prefetches: ascending; one alone where nothing is gathered ahead.
    variants: ascending; 0 alone where there is no other communicator. They have their memory already.
    layer_bytes: of the largest layer, which each depth holds once more.
    n_buckets: that exist at a time, besides what is filled.
    """

    buckets_bytes: tuple[int, ...]
    prefetches: tuple[int, ...]
    layer_bytes: int = 0
    n_buckets: int = 2
    variants: tuple[int, ...] = (0,)

    def around(self, settings: StepSettings) -> Iterator[StepSettings]:
        """All that differ in one: buckets, then depths, the nearest first and larger before smaller, then variants."""
        for bucket in _nearest(self.buckets_bytes, settings.bucket_bytes):
            yield settings._replace(bucket_bytes=bucket)
        for depth in _nearest(self.prefetches, settings.prefetch):
            yield settings._replace(prefetch=depth)
        for variant in self.variants:
            if variant != settings.variant:
                yield settings._replace(variant=variant)

    def more_bytes(self, now: StepSettings, then: StepSettings) -> int:
        """Device memory that `then` takes beyond `now`, at most."""
        buckets = (self.n_buckets + 1) * (then.bucket_bytes - now.bucket_bytes)
        return max(0, buckets) + max(0, self.layer_bytes * (then.prefetch - now.prefetch))

    def nearest(self, bucket_bytes: int | None, prefetch: int | None, to: StepSettings) -> StepSettings:
        """What was asked for, as far as it exists.

        Args:
            bucket_bytes: at most; None: as `to` has it.
            prefetch: layers gathered ahead; None likewise.
        """
        bucket = to.bucket_bytes if bucket_bytes is None else bucket_bytes
        depth = to.prefetch if prefetch is None else prefetch
        return StepSettings(
            max((b for b in self.buckets_bytes if b <= bucket), default=self.buckets_bytes[0]),
            min(self.prefetches, key=lambda known: abs(known - depth)),
            to.variant,
        )


def chunk_cap_bytes(bucket_bytes: int) -> int:
    """The most that a chunk may have for buckets to be made of whole chunks."""
    return max(1, bucket_bytes // FINEST)


def ladder(chunk_bytes: int, longest_bytes: int, begin_bytes: int) -> tuple[int, ...]:
    """Buckets worth trying: powers of two of a chunk, up to the first that holds the longest buffer.

    Args:
        begin_bytes: bucket at the beginning; nothing above eight times that.

    Returns:
        Ascending; one at least.
    """
    found = [max(1, chunk_bytes)]
    while found[-1] < longest_bytes and found[-1] * 2 <= 8 * begin_bytes:
        found.append(found[-1] * 2)
    return tuple(found)


def _nearest(values: tuple[int, ...], to: int) -> list[int]:
    place = values.index(to)
    others = [other for other in range(len(values)) if other != place]
    return [values[other] for other in sorted(others, key=lambda other: (abs(other - place), -other))]
