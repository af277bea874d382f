"""Rounds of `chaos.py`: each is kept as it ends, so that a run that was interrupted goes on with the next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

ROUNDS: Final = Path(__file__).parents[2] / "build" / "chaos.jsonl"
MOST: Final = "worst_"
"""How figures begin of which the largest counts; of all others the sum."""


class Rounds:
    """What rounds of one plan found."""

    def __init__(self, plan: str, path: Path = ROUNDS) -> None:
        self._plan, self._path = plan, path
        kept = [one for one in self._lines() if one["plan"] == plan]
        self.figures: list[dict[str, float]] = [one["figures"] for one in kept]
        """Of each round that ended."""

    def add(self, figures: dict[str, float]) -> None:
        """One more has ended."""
        self.figures.append(figures)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write("\n" + json.dumps({"plan": self._plan, "figures": figures}) + "\n")  # behind a line cut off

    def forget(self) -> None:
        """The plan has ended, or begins afresh."""
        self.figures = []
        others = [one for one in self._lines() if one["plan"] != self._plan]
        if self._path.exists():
            self._path.write_text("".join(json.dumps(one) + "\n" for one in others))

    def _lines(self) -> list[dict[str, Any]]:
        """A line that was cut off is none."""
        found = []
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found


def together(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """Figures of all rounds: sums, and of `worst_` the largest."""
    found: dict[str, float] = {}
    for figures in rounds:
        for name, value in figures.items():
            before = found.get(name, 0)
            found[name] = max(before, value) if name.startswith(MOST) else before + value
    return found
