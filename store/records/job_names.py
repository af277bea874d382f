"""Names that people give their jobs, beside the ids that tell jobs apart."""

from __future__ import annotations

from typing import Final

MAX_NAME_LENGTH: Final = 64


def is_job_name(text: str) -> bool:
    """Whether a job may be called so: up to 64 letters of any script, digits, spaces within and ASCII's other signs."""
    signs_are_plain = all(letter.isalnum() or (letter.isascii() and letter.isprintable()) for letter in text)
    return 0 < len(text) <= MAX_NAME_LENGTH and text == text.strip() and signs_are_plain


def titled(job_id: str, name: str) -> str:
    """How a job is shown to people: its name, where it has one, and its id."""
    return f"{name} ({job_id})" if name else job_id
