"""Names in code keep to the glossary: one word, one meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def _breaches(source: str, refused: set[str]) -> set[str]:
    """Names in a module that the glossary refuses."""
    return {name for name, is_class in _names(source) if (is_class and name in refused) or refused & _words_of(name)}


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
    return {name for name, _ in _names(source) if foreign & _words_of(name)}


def test_the_glossary_refuses_words() -> None:
    refused = _refused()
    assert {"turn", "untold", "Verdict"} <= refused
    assert _breaches("class Verdict: ...\ndef end_turn(n_muster): ...\nclass TrialVerdict: ...", refused) == {
        "Verdict",
        "end_turn",
        "n_muster",
    }


@pytest.mark.parametrize("package", PRODUCT)
def test_no_name_is_refused(package: str) -> None:
    refused = _refused()
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / package).rglob("*.py"))
        if (names := _breaches(path.read_text(), refused))
    }
    assert found == {}


def test_a_word_of_one_place_is_found_elsewhere() -> None:
    places = _places()
    assert {"verdict", "belief", "stage"} <= set(places)
    source = "def judge(): n_verdicts = 1"
    assert _elsewhere("tuner/offline/replay/engine.py", source, places) == set()
    assert _elsewhere("tuner/offline/report/facts.py", source, places) == {"n_verdicts"}


@pytest.mark.parametrize("package", PRODUCT)
def test_words_of_one_place_stay_there(package: str) -> None:
    places = _places()
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / package).rglob("*.py"))
        if (names := _elsewhere(str(path.relative_to(ROOT)), path.read_text(), places))
    }
    assert found == {}
