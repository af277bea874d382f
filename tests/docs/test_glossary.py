"""Names in code keep to the glossary: one word, one meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("agent", "store", "tuner", "zero_runtime")


def _refused() -> set[str]:
    """Words in code font in the first column of "Words we do not use"."""
    section = (
        (ROOT / "docs" / "glossary.md").read_text().split("## Words we do not use")[1].split("Words of one place")[0]
    )
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", section, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`(\w+)`", row)}


def _names(source: str) -> Iterator[tuple[str, bool]]:
    """Whatever a module gives a name to, and whether that is a class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, False
        elif isinstance(node, ast.arg):
            yield node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, False


def _words_of(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_"))


@cache
def _named(source: str) -> tuple[tuple[str, bool, frozenset[str]], ...]:
    """Each name once, with its words."""
    return tuple((name, is_class, frozenset(_words_of(name))) for name, is_class in set(_names(source)))


def _breaches(source: str, refused: set[str]) -> set[str]:
    """Names in a module that the glossary refuses."""
    return {name for name, is_class, words in _named(source) if (is_class and name in refused) or refused & words}


def _places() -> dict[str, tuple[str, ...]]:
    """Words of one place, and where that is."""
    section = (ROOT / "docs" / "glossary.md").read_text().split("| word | only below |")[1]
    rows = re.findall(r"^\| (`[^|]*) \| (`[^|]*) \|", section, re.MULTILINE)
    return {
        word: tuple(re.findall(r"`(\S+)`", below)) for words, below in rows for word in re.findall(r"`(\w+)`", words)
    }


def _elsewhere(path: str, source: str, places: dict[str, tuple[str, ...]]) -> set[str]:
    """Names in a module that have a word of another place."""
    foreign = {word for word, below in places.items() if not path.startswith(below)}
    return {name for name, _, words in _named(source) if foreign & words}


def test_names_in_the_product_keep_to_the_glossary() -> None:
    refused, places = _refused(), _places()
    assert refused
    assert places
    found = {}
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            name, source = str(path.relative_to(ROOT)), path.read_text()
            if wrong := _breaches(source, refused) | _elsewhere(name, source, places):
                found[name] = wrong
    assert found == {}
