"""Names that people give their jobs, beside the ids that tell jobs apart."""

from __future__ import annotations

from typing import Final

MAX_NAME_LENGTH: Final = 64


def is_job_name(text: str) -> bool:
    """Whether the text is a valid name: up to 64 letters of any script, digits, inner spaces and ASCII punctuation."""
    signs_are_plain = all(letter.isalnum() or (letter.isascii() and letter.isprintable()) for letter in text)
    return 0 < len(text) <= MAX_NAME_LENGTH and text == text.strip() and signs_are_plain


def titled(job_id: str, name: str) -> str:
    """A job for people: its name, if it has one, and its id."""
    return f"{name} ({job_id})" if name else job_id
