"""docs/operate/errors.md has the words that users search for, as the product prints them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from zerotune.agent.reasons import Reason
from zerotune.store.records import MissingEvidence
from zerotune.tuner.client.status import in_words

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate" / "errors.md").read_text()
LEAST_CHARACTERS = 8
"""Shorter pieces between values are no words that anybody searches for."""


def test_why_a_job_was_not_tuned() -> None:
    rows = {f"| `{reason.name}` | {reason.value.format(detail='...')} |" for reason in Reason}
    assert {row for row in rows if row not in PAGE} == set()


def test_why_a_workload_was_not_recognised() -> None:
    assert [missing for missing in MissingEvidence if in_words(missing) not in PAGE] == []


def test_findings_of_doctor_are_listed() -> None:
    found = {
        (code, words)
        for path in (ROOT / "tuner" / "doctor").glob("*.py")
        for code, words in _findings(ast.parse(path.read_text()))
    }
    assert len(found) > 20
    lines = PAGE.splitlines()
    assert [
        (code, words)
        for code, words in sorted(found)
        if not any(line.startswith(f"| `{code}` |") and words.strip(" ,:;") in line for line in lines)
    ] == []


def _findings(module: ast.Module) -> Iterator[tuple[str, str]]:
    """The code of each problem and warning, with each constant piece of what it says."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("problem", "warning"):
            code, found = (one for one in node.args[:2])
            if isinstance(code, ast.Constant):
                yield code.value, ""
                for piece in ast.walk(found):
                    if isinstance(piece, ast.Constant) and len(str(piece.value).strip()) >= LEAST_CHARACTERS:
                        yield code.value, piece.value
