"""The lines of an NCCL_DEBUG log with calls (COLL) and selections (TUNING).

What differs from line to line is returned as numbers; what many lines have in common, as a few distinct texts, each of
which is parsed once. A piece in which all such lines have NCCL's usual form is read as columns, any other line by
line, with the same result.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotune.tuner.traces.columns import Fields, Integers

MAX_LOG_LINE_BYTES: Final = 4096
"""NCCL's own lines have at most 1,024."""

_OWNER: Final = rb"(?:\S*[\]>|:])?(?P<host>[^\s:\]>|]+:\d+):\d+ \[\d+\] NCCL INFO"
CALL_HEAD: Final = re.compile(_OWNER + rb" (?P<name>\w+):")
CALL_TAIL: Final = re.compile(
    rb"datatype (?P<datatype>\d{1,3}) op \S+ root \S+ comm (?P<comm>0x[0-9a-f]+) \[nranks=(?P<n_ranks>\d{1,9})\]"
)
CHOICE_HEAD: Final = re.compile(_OWNER + rb"(?: (?P<name>\w+)(?P<symmetric> \[Symmetric\])?:)?")
CHOICE_TAIL: Final = re.compile(
    rb"Algo (?P<algorithm>\w+) +proto (?P<protocol>\w+) +"
    rb"(?:channel\{Lo\.\.Hi\}=\{(?P<low>\d{1,4})\.\.(?P<high>\d{1,4})\}|time)|Kernel (?P<kernel>\S+)"
)
_PREFIX: Final = rb"(?<!\S)(\S+ \[\d+\] NCCL INFO"
_CALL: Final = re.compile(
    _PREFIX + rb" \w+:) opCount ([0-9a-f]{1,16}) sendbuff [^ ]* recvbuff [^ ]* (?:acc [^ ]* )?count (\d{1,18}) "
    rb"(datatype \d{1,3} op \S+ root \S+ comm 0x[0-9a-f]+ \[nranks=\d{1,9}\])"
)
_CHOICE: Final = re.compile(
    _PREFIX + rb"(?: \w+(?: \[Symmetric\])?:)?) +(\d{1,18}) Bytes ?-> "
    rb"(Algo \w+ +proto \w+ +(?:channel\{Lo\.\.Hi\}=\{\d{1,4}\.\.\d{1,4}\}|time)|Kernel \S+)"
)
_LOW_BITS: Final = 0xFFFFFFFF


class Lines(NamedTuple):
    """Lines of one sort."""

    kinds: list[tuple[bytes, bytes]]
    """The distinct texts before and after the numbers."""
    picks: NDArray[np.intp]
    """The kind of each line."""
    amounts: Integers
    """The count or bytes of each line."""
    op_counts: Integers
    """The number of each call on its communicator (the low 32 bits)."""
    n_damaged: int
    """Lines that could not be read."""


def calls(text: bytes) -> Lines:
    """Calls of collectives and of point-to-point operations."""
    n_lines = text.count(b": opCount ")
    lines = _even_calls(text, n_lines) if n_lines else None
    return _each(text, n_lines, b": opCount ", _CALL) if lines is None else lines


def choices(text: bytes) -> Lines:
    """What rank 0 selected: algorithm and protocol, or a kernel on symmetric memory."""
    n_lines = text.count(b"-> Algo ") + text.count(b" Bytes -> Kernel ")
    lines = _even_choices(text, n_lines) if n_lines else None
    return _each(text, n_lines, b"-> ", _CHOICE) if lines is None else lines


def _even_calls(text: bytes, n_lines: int) -> Lines | None:
    fields = Fields(text, b" ")
    at = fields.find(b"opCount")
    if len(at) != n_lines or at[0] < 6 or at[-1] + 18 >= len(fields) or not fields.unbroken(at, 8):
        return None
    # RCCL 2.22 and newer name one buffer more.
    count = next((at + offset for offset in (6, 8) if bool(fields.are(at + offset, b"count").all())), None)
    words = ((at + 2, b"sendbuff"), (at + 4, b"recvbuff"))
    if count is None or not all(bool(fields.are(column, word).all()) for column, word in words):
        return None
    if count[0] != at[0] + 6 and not bool(fields.are(at + 6, b"acc").all()):
        return None
    kinds = _kinds(fields.texts(at - 5, at - 1), CALL_HEAD, fields.texts(count + 2, count + 10), CALL_TAIL)
    op_counts, counts = fields.integers(at + 1, 16), fields.integers(count + 1)
    if kinds is None or op_counts is None or counts is None:
        return None
    return Lines(*kinds, counts, op_counts & _LOW_BITS, 0)


def _even_choices(text: bytes, n_lines: int) -> Lines | None:
    fields = Fields(text, b" ")
    at = fields.find(b"Algo")
    if len(at) != n_lines or at[0] < 9 or at[-1] + 4 >= len(fields) or not fields.unbroken(at - 3, 3):
        return None
    if not (fields.are(at - 1, b"->") & fields.are(at - 2, b"Bytes")).all():
        return None
    kinds = _kinds(fields.texts(at - 8, at - 4), CHOICE_HEAD, fields.texts(at, at + 4), CHOICE_TAIL)
    stated = fields.integers(at - 3)
    return None if kinds is None or stated is None else Lines(*kinds, stated, stated, 0)


_Texts = tuple[Integers, list[bytes]] | None


def _kinds(
    heads: _Texts, head_pattern: re.Pattern[bytes], tails: _Texts, tail_pattern: re.Pattern[bytes]
) -> tuple[list[tuple[bytes, bytes]], NDArray[np.intp]] | None:
    """The pairs of texts that occur, and which of them each line has; None if a text has another form."""
    if heads is None or tails is None:
        return None
    for (_, texts), pattern in ((heads, head_pattern), (tails, tail_pattern)):
        if not all(map(pattern.fullmatch, texts)):
            return None
    pairs, picks = np.unique(heads[0] * len(tails[1]) + tails[0], return_inverse=True)
    return [(heads[1][pair // len(tails[1])], tails[1][pair % len(tails[1])]) for pair in pairs.tolist()], picks


def _each(text: bytes, n_lines: int, mark: bytes, pattern: re.Pattern[bytes]) -> Lines:
    """Read line by line, where the columns did not have the usual form."""
    known: dict[tuple[bytes, bytes], int] = {}
    picks: list[int] = []
    amounts: list[int] = []
    op_counts: list[int] = []
    for line in text.split(b"\n") if n_lines else ():
        found = pattern.search(line) if mark in line and len(line) <= MAX_LOG_LINE_BYTES else None
        if found is not None:
            head, *numbers, tail = found.groups()
            picks.append(known.setdefault((head, tail), len(known)))
            amounts.append(int(numbers[-1]))
            op_counts.append(int(numbers[0], 16) & _LOW_BITS)
    return Lines(
        list(known), np.array(picks, np.intp), np.array(amounts, np.int64), np.array(op_counts, np.int64),
        n_lines - len(picks),
    )  # fmt: skip
