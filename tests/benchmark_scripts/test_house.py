"""The ratchet on the size of the house."""

from __future__ import annotations

from benchmarks.recording.house import AIMS, REACHED, sizes


def test_the_house_does_not_grow() -> None:
    size = sizes()
    for metric, aim in AIMS.items():
        assert size[metric] <= max(REACHED[metric], aim), f"{metric}; `python -m benchmarks house` counts"
