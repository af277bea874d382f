"""A text of many equal lines, cut into fields and read column by column with numpy.

That costs a fraction of what a regular expression per line does. A column that does not hold what it should is None:
then the caller reads the same text line by line.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Masks = NDArray[np.bool_]

MAX_DIGITS: Final = 15
"""What a float can hold exactly."""
MAX_PLACES: Final = 6
MAX_TEXT_BYTES: Final = 256
_EXACT: Final = 1 << 53
_NEWLINE: Final = 10
_POINT: Final = ord(".")
_WORD: Final = 8
_MASKS: Final = np.array([(1 << 8 * n_bytes) - 1 for n_bytes in range(_WORD + 1)], np.uint64)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_VALUES: Final = np.full(256, 255, np.int64)
_VALUES[list(b"0123456789abcdef")] = np.arange(16)


class Fields:
    """Where each field of a text begins and ends.

    Fields stand between single separators or line breaks; with `squeeze`, between any number of them. A column is
    an array of field numbers.
    """

    def __init__(self, text: bytes, separator: bytes, *, squeeze: bool = False) -> None:
        # Numbers are read from their ends and texts eight bytes at a time, so zeros stand around.
        self._padded = b"".join((bytes(MAX_DIGITS), text, b"\n", bytes(MAX_TEXT_BYTES + _WORD)))
        self._bytes = np.frombuffer(self._padded, np.uint8)
        self._words = np.ndarray((len(self._padded) - _WORD + 1,), "<u8", self._padded, 0, (1,))
        separates = self._bytes == separator[0]
        separates |= self._bytes == _NEWLINE
        end = np.flatnonzero(separates)
        begin = np.empty_like(end)
        begin[0] = MAX_DIGITS
        np.add(end[:-1], 1, out=begin[1:])
        if squeeze:
            full = end > begin
            begin, end = begin[full], end[full]
        self.begin: Integers = begin
        self.end: Integers = end

    def lines(self) -> tuple[Integers, Integers]:
        """The first field of each line, and how many it has."""
        after = np.searchsorted(self.end, np.flatnonzero(self._bytes == _NEWLINE), "right")
        first = np.concatenate(([0], after[:-1]))
        return first, after - first

    def unbroken(self, first: Integers, n_fields: int) -> bool:
        """Whether none of `n_fields` fields from `first` on ends its line."""
        return not bool((self._bytes[self.end[first[:, None] + np.arange(n_fields)]] == _NEWLINE).any())

    def made_of(self, fields: Integers, characters: bytes) -> bool:
        """Whether these fields have no other characters."""
        is_other = np.ones(256, bool)
        is_other[list(characters)] = False
        n_others = np.cumsum(is_other[self._bytes], dtype=np.int32)
        return bool((n_others[self.end[fields] - 1] == n_others[self.begin[fields] - 1]).all())

    def find(self, word: bytes) -> Integers:
        """The fields that are `word` (at most 8 bytes)."""
        fields = np.flatnonzero(self.end - self.begin == len(word))
        return fields[self.are(fields, word)]

    def are(self, fields: Integers, word: bytes) -> Masks:
        """Which of these fields are `word` (at most 8 bytes)."""
        begin = self.begin[fields]
        wanted = np.uint64(int.from_bytes(word, "little"))
        same: Masks = (self._words[begin] & _MASKS[len(word)] == wanted) & (self.end[fields] - begin == len(word))
        return same

    def integers(self, fields: Integers, base: int = 10) -> Integers | None:
        """Whole numbers without a sign, of at most MAX_DIGITS digits."""
        return self._digits(self.begin[fields], self.end[fields], base)

    def decimals(self, fields: Integers) -> Floats | None:
        """Numbers without a sign or exponent, of at most MAX_PLACES places; exactly as float() reads them."""
        begin, end = self.begin[fields], self.end[fields]
        n_places = np.zeros(len(fields), np.int64)
        for place in range(1, MAX_PLACES + 1):
            point = end - place - 1
            n_places[(self._bytes[point] == _POINT) & (point >= begin)] = place
        whole = self._digits(begin, np.where(n_places > 0, end - n_places - 1, end))
        places = self._digits(end - n_places, end, may_be_empty=True)
        if whole is None or places is None or whole.max() >= _EXACT // 10**MAX_PLACES:
            return None
        scale = 10**n_places
        # Both sides are exact as floats, so the quotient is rounded once, as float() rounds.
        return (whole * scale + places) / scale

    def texts(self, first: Integers, last: Integers) -> tuple[Integers, list[bytes]] | None:
        """What stands from one column to another: of each line the number of its text, and the distinct texts."""
        begin, n_bytes = self.begin[first], self.end[last] - self.begin[first]
        if not len(begin) or n_bytes.max() > MAX_TEXT_BYTES or n_bytes.min() < 0:
            return None
        offsets = np.arange(0, int(n_bytes.max()), _WORD)
        words = self._words[begin[:, None] + offsets] & _MASKS[np.clip(n_bytes[:, None] - offsets, 0, _WORD)]
        hashes = n_bytes.astype(np.uint64)
        for word in words.T:
            hashes = (hashes ^ word) * _MIX
            hashes ^= hashes >> np.uint64(29)
        _, examples, picks = np.unique(hashes, return_index=True, return_inverse=True)
        if not np.array_equal(words, words[examples[picks]]):
            return None  # two texts of one hash
        return picks, [self._padded[begin[at] : begin[at] + n_bytes[at]] for at in examples]

    def _digits(self, begin: Integers, end: Integers, base: int = 10, *, may_be_empty: bool = False) -> Integers | None:
        n_digits = end - begin
        if not len(n_digits) or n_digits.max() > MAX_DIGITS or n_digits.min() < (0 if may_be_empty else 1):
            return None
        positions = np.arange(int(n_digits.max()))
        digits = _VALUES[self._bytes[end[:, None] - 1 - positions]]
        digits[positions >= n_digits[:, None]] = 0
        return digits @ base**positions if bool((digits < base).all()) else None
