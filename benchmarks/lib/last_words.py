"""The reason for a process's end, from its output."""

from __future__ import annotations

import re

_ERROR = re.compile(r"\wError\b.*:|Signal \d+")
_LAUNCHER = "ChildFailed"
"""torchrun adds this about a rank that has already printed its error."""
MOST_CHARACTERS = 300
"""A line of a table."""


def last_words(text: str) -> str:
    """The last error in a log, else its last line: warnings often come after the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and _LAUNCHER not in line]
    return (errors or lines or ["it said nothing"])[-1][:MOST_CHARACTERS]
