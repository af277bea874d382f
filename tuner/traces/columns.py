"""Lines of equal form, cut into fields and read column by column with numpy.

This takes a fraction of the time of a regular expression per line. numpy's loadtxt would read tables only, not logs
with other lines between, and cuts long texts silently. A column whose fields have another form is None: then the
caller reads the same text line by line.
"""

from __future__ import annotations

import threading
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
_VALUES: Final = np.full(256, 255, np.uint8)
_VALUES[list(b"0123456789abcdef")] = np.arange(16)


class _Scratch(threading.local):
    """Memory that is reused: to get fresh pages from the system would take longer than the work in them."""

    def __init__(self) -> None:
        self._flags = np.empty((2, 0), bool)
        self._numbers = np.empty(0, np.int64)

    def flags(self, n_flags: int) -> NDArray[np.bool_]:
        """Two rows of at least `n_flags`."""
        if self._flags.shape[1] < n_flags:
            self._flags = np.empty((2, n_flags), bool)
        return self._flags[:, :n_flags]

    def numbers(self, n_numbers: int) -> Integers:
        """At least `n_numbers`."""
        if len(self._numbers) < n_numbers:
            self._numbers = np.empty(n_numbers, np.int64)
        return self._numbers[:n_numbers]


_scratch: Final = _Scratch()


class Fields:
    """Where each field of a text ends; it begins after the end of the field before.

    Fields stand between single separators or line breaks. A column is an array of field numbers, from 1 on.
    """

    def __init__(self, text: bytes, separator: bytes) -> None:
        # A break before the text ends the field 0; zeros after it let the last texts be read eight bytes at a time.
        self._padded = b"".join((b"\n", text, b"\n", bytes(_WORD)))
        self._bytes = np.frombuffer(self._padded, np.uint8)
        self._words = np.ndarray((len(self._padded) - _WORD + 1,), "<u8", self._padded, 0, (1,))
        separates, breaks = _scratch.flags(len(self._bytes))
        np.equal(self._bytes, separator[0], out=separates)
        np.logical_or(separates, np.equal(self._bytes, _NEWLINE, out=breaks), out=separates)
        self._end: Integers = np.flatnonzero(separates)

    def __len__(self) -> int:
        return len(self._end)

    def lines(self) -> tuple[Integers, Integers]:
        """The first field of each line, and how many it has."""
        last = np.flatnonzero(self._bytes[self._end] == _NEWLINE)
        return last[:-1] + 1, np.diff(last)

    def unbroken(self, first: Integers, n_fields: int) -> bool:
        """Whether none of `n_fields` fields from `first` on ends its line."""
        return not any((self._bytes[self._end[first + offset]] == _NEWLINE).any() for offset in range(n_fields))

    def full(self) -> tuple[Integers, Integers, Integers]:
        """The fields that are not empty; and the place there of each line's first, and how many each line has."""
        fields = np.flatnonzero(np.subtract(self._end[1:], self._end[:-1], out=_scratch.numbers(len(self) - 1)) > 1) + 1
        last = np.flatnonzero(self._bytes[self._end] == _NEWLINE)
        after = np.searchsorted(fields, last, "right")
        return fields, after[:-1], np.diff(after)

    def find(self, word: bytes) -> Integers:
        """The fields that are `word` (at most 8 bytes)."""
        n_bytes = np.subtract(self._end[1:], self._end[:-1], out=_scratch.numbers(len(self) - 1))
        fields = np.flatnonzero(n_bytes == len(word) + 1) + 1
        return fields[self.are(fields, word)]

    def are(self, fields: Integers, word: bytes) -> Masks:
        """Which of these fields are `word` (at most 8 bytes)."""
        begin, end = self._end[fields - 1] + 1, self._end[fields]
        wanted = np.uint64(int.from_bytes(word, "little"))
        same: Masks = (self._words[begin] & _MASKS[len(word)] == wanted) & (end - begin == len(word))
        return same

    def integers(self, fields: Integers, base: int = 10) -> Integers | None:
        """Whole numbers without a sign, of at most MAX_DIGITS digits."""
        return self._digits(self._end[fields - 1] + 1, self._end[fields], base)

    def decimals(self, fields: Integers) -> Floats | None:
        """Numbers without a sign or exponent, of at most MAX_PLACES places; exactly as float() reads them."""
        begin, end = self._end[fields - 1] + 1, self._end[fields]
        n_places = np.zeros(len(fields), np.int64)
        for place in range(1, MAX_PLACES + 1):
            point = end - place - 1
            n_places[(self._bytes[point] == _POINT) & (point >= begin)] = place
            if n_places.all():
                break
        whole = self._digits(begin, np.where(n_places > 0, end - n_places - 1, end))
        places = self._digits(end - n_places, end, may_be_empty=True)
        if whole is None or places is None or whole.max() >= _EXACT // 10**MAX_PLACES:
            return None
        scale = 10**n_places
        # Both sides are exact as floats, so the quotient is rounded once, as float() rounds.
        return (whole * scale + places) / scale

    def texts(self, first: Integers, last: Integers) -> tuple[Integers, list[bytes]] | None:
        """The text from one column to another: for each line the index of its text, and the distinct texts."""
        begin, end = self._end[first - 1] + 1, self._end[last]
        n_bytes = end - begin
        if not len(begin) or n_bytes.max() > MAX_TEXT_BYTES or n_bytes.min() < 0:
            return None
        words = [self._word(begin + offset, n_bytes - offset) for offset in range(0, int(n_bytes.max()), _WORD)]
        if (n_bytes == n_bytes[0]).all() and all((word == word[0]).all() for word in words):
            return np.zeros(len(begin), np.int64), [self._padded[begin[0] : end[0]]]
        hashes = n_bytes.astype(np.uint64)
        for word in words:
            hashes = (hashes ^ word) * _MIX
            hashes ^= hashes >> np.uint64(29)
        _, examples, picks = np.unique(hashes, return_index=True, return_inverse=True)
        if not all(np.array_equal(word, word[examples][picks]) for word in words):
            return None  # two texts of one hash
        return picks, [self._padded[begin[at] : end[at]] for at in examples]

    def _word(self, begin: Integers, n_bytes: Integers) -> NDArray[np.uint64]:
        """Up to eight bytes from each place on, as one number; fewer where the text ends, none beyond its end."""
        if n_bytes.min() >= _WORD:
            whole: NDArray[np.uint64] = self._words[begin]
            return whole
        n_bytes = np.clip(n_bytes, 0, _WORD)
        part: NDArray[np.uint64] = self._words[np.where(n_bytes > 0, begin, 0)] & _MASKS[n_bytes]
        return part

    def _digits(self, begin: Integers, end: Integers, base: int = 10, *, may_be_empty: bool = False) -> Integers | None:
        n_digits = end - begin
        if not len(n_digits) or n_digits.max() > MAX_DIGITS or n_digits.min() < (0 if may_be_empty else 1):
            return None
        numbers = np.zeros(len(n_digits), np.int64)
        for place in range(int(n_digits.max()), 0, -1):  # shorter numbers are as if padded with zeros
            digits = _VALUES[self._bytes[end - place]]
            digits[n_digits < place] = 0
            if digits.max() >= base:
                return None
            numbers *= base
            numbers += digits
        return numbers
