"""Sizes and shares as people write them: `16MB` is decimal, `16MiB` binary, `16M` binary as in nccl-tests."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

import typer

MAX_BYTES: Final = 2**63 - 1
HOW_WRITTEN: Final = "write bytes (1048576, 1e6) or 16MB (10^6), 16MiB (2^20), 16M (2^20, as nccl-tests)"
_PREFIXES: Final = "kmgtp"
# The exponent is short: 1e999999999 would take minutes to print.
_WRITTEN: Final = re.compile(
    r"(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(e[+-]?\d{1,2})?\s*(?:([kmgtp])(ib?|b)?|b)?", re.IGNORECASE | re.ASCII
)


def parse_bytes(text: str, *, plain_unit: int = 1) -> int:
    """The number of bytes, at least 1, that `text` names, in `plain_unit` bytes if it has no unit.

    Raises ValueError with the text and how to write sizes.
    """
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; {HOW_WRITTEN}")
    number, exponent, prefix, suffix = found.groups()
    if prefix is None:
        unit = 1 if found[0].lower().endswith("b") else plain_unit
    else:
        unit = (1000 if (suffix or "").lower() == "b" else 1024) ** (1 + _PREFIXES.index(prefix.lower()))
    exact = Decimal(number + (exponent or "")) * unit
    n_bytes = int(exact)
    if n_bytes != exact and exact > 1:
        raise ValueError(f"{text!r} is {exact.normalize():f} bytes, which is no whole number; {HOW_WRITTEN}")
    if not 1 <= n_bytes <= MAX_BYTES:
        raise ValueError(
            f"{text!r} is {'less than one byte' if n_bytes < 1 else 'more than any message has'}; {HOW_WRITTEN}"
        )
    return n_bytes


def a_size(text: str | int) -> int:
    """Bytes, for an option's `parser`."""
    return _option(text, 1)


def megabytes(text: str | int) -> int:
    """Bytes, for the `parser` of an option; a number without a unit counts 10^6 bytes."""
    return _option(text, 10**6)


def share(text: str | float) -> float:
    """A share that may be written in percent, for an option's `parser`."""
    return percent(text) / 100.0 if str(text).strip().endswith("%") else percent(text)


def percent(text: str | float) -> float:
    """A number that may end in a percent sign, for an option's `parser`."""
    try:
        return float(str(text).strip().removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; write one, or 1% for a hundredth") from None


def _option(text: str | int, plain_unit: int) -> int:
    if isinstance(text, int):  # typer also parses a default
        return text
    try:
        return parse_bytes(text, plain_unit=plain_unit)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
