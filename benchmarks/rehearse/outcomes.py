"""The outcome of each case, written at once: an interrupted run goes on from there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.rehearse.environments import REPOSITORY

OUTCOMES: Final = REPOSITORY / "build" / "rehearse" / "outcomes.jsonl"


@dataclass(frozen=True)
class Outcome:
    """Of one case with one release."""

    release: str
    case: str
    outcome: str
    """`ok`, `failed` or `skipped`."""
    reason: str = ""
    seconds: float = 0.0
    n_measured: int = 0
    """Collectives that the daemon has measurements of."""


class Outcomes:
    def __init__(self, path: Path, *, afresh: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if afresh:
            path.unlink(missing_ok=True)
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._all = {(one.release, one.case): one for one in (Outcome(**json.loads(line)) for line in lines)}

    def is_done(self, release: str, case: str) -> bool:
        """It went well before."""
        known = self._all.get((release, case))
        return known is not None and known.outcome == "ok"

    def add(self, outcome: Outcome) -> None:
        self._all[outcome.release, outcome.case] = outcome
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    def all_well(self) -> bool:
        return all(one.outcome != "failed" for one in self._all.values())

    def table(self, cases: Sequence[str]) -> str:
        """A line per case, a column per release, then the reasons."""
        releases = sorted({release for release, _ in self._all}, key=lambda name: [int(n) for n in name.split(".")])
        lines = ["| case | " + " | ".join(f"torch {release}" for release in releases) + " |"]
        lines.append("|---" * (1 + len(releases)) + "|")
        for case in cases:
            cells = [self._all.get((release, case)) for release in releases]
            lines.append(f"| {case} | " + " | ".join(one.outcome if one else "" for one in cells) + " |")
        reasons = [one for one in self._all.values() if one.reason and one.outcome != "ok"]
        return "\n".join([*lines, "", *(f"- {one.case}, torch {one.release}: {one.reason}" for one in reasons)])
