"""A stand-in for CUDA-graph capture: what was decided at capture is what every replay runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_capturing = False


def is_capturing() -> bool:
    """Whether collectives issued now are being captured."""
    return _capturing


@contextmanager
def capturing() -> Iterator[None]:
    """Collectives issued inside count as captured."""
    global _capturing
    before, _capturing = _capturing, True
    try:
        yield
    finally:
        _capturing = before
