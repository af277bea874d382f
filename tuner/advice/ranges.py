"""A quantity that is not known exactly."""

from __future__ import annotations

import msgspec


class Range(msgspec.Struct, frozen=True):
    """`expected`, and between which bounds nine of ten such quantities lie."""

    low: float
    expected: float
    high: float

    def inverse(self, numerator: float) -> Range:
        """`numerator` over this: the bounds change places."""
        return Range(numerator / self.high, numerator / self.expected, numerator / self.low)

    def times(self, factor: float) -> Range:
        """This, scaled."""
        return Range(self.low * factor, self.expected * factor, self.high * factor)
