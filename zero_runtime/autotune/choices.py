"""The settings that a step can run with, and the order of their trials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

FINEST: Final = 16
"""Most chunks of a bucket: each costs a call, and a place in the layout."""
DEEPEST: Final = 3
"""Most layers gathered ahead: a fourth hides no more than three, and costs memory."""


class StepSettings(NamedTuple):
    """Settings that may change between steps without changing a bit of the training."""

    bucket_bytes: int
    prefetch: int
    variant: int = 0
    """The entry of `communicator_variants` that gathers run on, counted from 1; 0: the usual communicator."""


@dataclass(frozen=True)
class Choices:
    """All buckets, depths and variants that may run.

    buckets_bytes: ascending. prefetches: ascending; a single one if nothing is gathered ahead.
    variants: ascending; only 0 if there is no other communicator. Their communicators exist already.
    layer_bytes: size of the largest layer, which each level of depth holds once more.
    n_buckets: buckets that exist at a time, besides the one that is being filled.
    """

    buckets_bytes: tuple[int, ...]
    prefetches: tuple[int, ...]
    layer_bytes: int = 0
    n_buckets: int = 2
    variants: tuple[int, ...] = (0,)

    def around(self, settings: StepSettings) -> Iterator[StepSettings]:
        """All that differ in one setting: buckets, depths (nearest first, larger before smaller), then variants."""
        for bucket in _nearest(self.buckets_bytes, settings.bucket_bytes):
            yield settings._replace(bucket_bytes=bucket)
        for depth in _nearest(self.prefetches, settings.prefetch):
            yield settings._replace(prefetch=depth)
        for variant in self.variants:
            if variant != settings.variant:
                yield settings._replace(variant=variant)

    def more_bytes(self, now: StepSettings, then: StepSettings) -> int:
        """Most device memory that `then` takes beyond `now`."""
        buckets = (self.n_buckets + 1) * (then.bucket_bytes - now.bucket_bytes)
        return max(0, buckets) + max(0, self.layer_bytes * (then.prefetch - now.prefetch))

    def nearest(self, bucket_bytes: int | None, prefetch: int | None, to: StepSettings) -> StepSettings:
        """The nearest available setting, with a bucket of at most `bucket_bytes`; None: the value of `to`."""
        bucket = to.bucket_bytes if bucket_bytes is None else bucket_bytes
        depth = to.prefetch if prefetch is None else prefetch
        return StepSettings(
            max((b for b in self.buckets_bytes if b <= bucket), default=self.buckets_bytes[0]),
            min(self.prefetches, key=lambda known: abs(known - depth)),
            to.variant,
        )


def chunk_cap_bytes(bucket_bytes: int) -> int:
    """Largest chunk with which buckets are made of whole chunks."""
    return max(1, bucket_bytes // FINEST)


def ladder(chunk_bytes: int, longest_bytes: int, begin_bytes: int) -> tuple[int, ...]:
    """Buckets worth trying, ascending: powers of two of a chunk, up to the first that holds the longest buffer.

    The first one is always there. No further one is larger than eight times `begin_bytes`.
    """
    found = [max(1, chunk_bytes)]
    while found[-1] < longest_bytes and found[-1] * 2 <= 8 * begin_bytes:
        found.append(found[-1] * 2)
    return tuple(found)


def _nearest(values: tuple[int, ...], to: int) -> list[int]:
    place = values.index(to)
    others = [other for other in range(len(values)) if other != place]
    return [values[other] for other in sorted(others, key=lambda other: (abs(other - place), -other))]
