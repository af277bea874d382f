"""Ranges of numbers that travel: what is decoded outside of them is refused there."""

from __future__ import annotations

from typing import Annotated

import msgspec

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Ordinal = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A step, or an epoch: with room to count on, and below the marks of unknown ones."""
MessageBytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Micros = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Thirty years at most, and never NaN; differences of two clocks may be a little below 0."""
Pressure = Annotated[float, msgspec.Meta(ge=-1, le=1000)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
