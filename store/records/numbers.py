"""Ranges of numbers in messages and files; decoding refuses numbers outside of them."""

from __future__ import annotations

from typing import Annotated

import msgspec

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Ordinal = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A step or an epoch: it can still grow, and is smaller than the values for unknown ones."""
MessageBytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Micros = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""At most thirty years, and never NaN; differences of two clocks may be a little below 0."""
Pressure = Annotated[float, msgspec.Meta(ge=-1, le=1000)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
