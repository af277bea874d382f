"""The pages for users: few, short, and in sentences that are read at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    *(DOCS / f"{name}.md" for name in ("index", "quickstart", "how-it-works", "worth-it", "frameworks")),
    *sorted((DOCS / "operate").glob("*.md")),
]
MOST_PAGES, MOST_LINES, MOST_WORDS = 19, 1_675, 25
PRIVATE = re.compile(
    r"\b(greets?|knocks?|thieves|canary|canaries|roll call|muster|where none|that which|is told|is said|are none)\b",
    re.IGNORECASE,
)
"""Words of the code, and turns of phrase that hide who does what."""


def test_pages_are_few_and_short() -> None:
    assert len(PAGES) <= MOST_PAGES
    assert sum(len(page.read_text().splitlines()) for page in PAGES) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_are_short_and_plain(page: Path) -> None:
    sentences = list(_sentences(page.read_text()))
    assert sentences
    assert [one for one in sentences if len(one.split()) > MOST_WORDS] == []
    assert [one for one in sentences if PRIVATE.search(one)] == []


def _sentences(text: str) -> Iterator[str]:
    """What is not code: paragraphs, items of lists and cells of tables, cut into sentences."""
    text = re.sub(r"^ *```.*?^ *```$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*] |\d+\. |#|\|))|\|", text):
        plain = " ".join(re.sub(r"[*_]{2}|^#+|^ *- ", "", block).split())
        yield from (one for one in re.split(r"(?<=[.!?:])\s+", plain) if re.search(r"\w", one))
