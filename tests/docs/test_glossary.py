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
    section = (ROOT / "docs" / "glossary.md").read_text().split("## Words we do not use")[1]
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


def _breaches(source: str, refused: set[str]) -> set[str]:
    """Names in a module that the glossary refuses."""
    return {
        name
        for name, is_class in _names(source)
        if (is_class and name in refused)
        or refused & set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_"))
    }


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
