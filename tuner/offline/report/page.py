"""Writes facts and pictures as one self-contained HTML page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from ....store.atomic_file import users_file
from ....store.records import size_class_range
from ...client.status import workload
from ...decided import proven_decisions, since_takeover
from ..explaining.values import Explanation
from ..explaining.words import MEANINGS, noted, shown
from ..jobs.listing import as_gain
from ..jobs.listing_shown import unknown_gain
from ..size_ranges import rounded_range
from .facts import Facts, trust, untrained
from .pictures import Picture, pictures


def write_page(facts: Facts, out: Path) -> dict[str, str]:
    """Write the page to `out`, completely or not at all; returns reasons for missing pictures of a trace, by name.

    Raises:
        UserError: the job did not train, or `out` cannot be written.
    """
    if not facts.is_of_training:
        raise untrained(facts)
    drawn, missing = pictures(facts)
    text = _page(facts, drawn, missing)
    with users_file(out) as partial:
        partial.write_text(text, encoding="utf-8")
    return missing


def _page(facts: Facts, drawn: Sequence[Picture], missing: Mapping[str, str]) -> str:
    """The whole page as text."""
    template = resources.files("zerotune.tuner.offline.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["us"] = _us
    environment.filters["percent"] = lambda value: f"{value:+.1f} %".replace("-", "−")
    environment.filters["noted"] = noted
    titles = {"timeline": "Timeline", "ranks": "Tracks of the ranks"}
    return environment.from_string(template).render(
        facts=facts,
        incomparable=_incomparable(facts),
        pictures=drawn,
        decisions=_decision_rows(facts),
        undecided=_undecided(facts),
        workload=workload(facts.job.stage, facts.missing_evidence),
        collectives=facts.collectives_us(),
        meanings=MEANINGS,
        trust=[*trust(facts), *((titles[name], f"None: {reason}.") for name, reason in missing.items())],
        written=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.job.started_at_s)),
    )


def _incomparable(facts: Facts) -> str:
    """Why step times are not compared, in the words of `zerotune jobs`."""
    if facts.before is None and facts.highest_epoch == 0:
        return facts.before_after.explanation
    return unknown_gain(as_gain(facts.before_after))


def _decision_rows(facts: Facts) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    settled, in_force_by = facts.settled(), proven_decisions(since_takeover(facts.decisions))
    for one in facts.explained():
        key = one.key
        first = in_force_by.get(key, one.decision)
        rows.append(
            {
                "place": (key.collective.name, key.phase.name),
                "ranks": str(key.communicator),
                "bytes": rounded_range(one.min_bytes, one.max_bytes, "\nto ").splitlines(),
                "decision": one.decision,
                # The decision that put the setting in force: later ones may concern trials of other settings.
                "why": first if first and one.decision and first.candidate == one.decision.candidate else one.decision,
                "against_own": facts.against_own(settled[key]),
                "expected": _expected(one),
                "explained": one,
                "alternatives": shown(one.alternatives),
            }
        )
    return rows


def _expected(explained: Explanation) -> tuple[float | None, float | None, float | None]:
    """Expected time of the setting that the last decision chose, and its 90 % interval (us)."""
    for one in explained.alternatives:
        if one["candidate"] == (explained.not_adopted or explained.setting) and one["predicted_us"] is not None:
            return one["predicted_us"], one["predicted_low_us"], one["predicted_high_us"]
    last = explained.decision
    return (None, None, None) if last is None else (last.predicted_us, last.predicted_low_us, last.predicted_high_us)


def _undecided(facts: Facts) -> list[str]:
    """Collectives of this job without any decision."""
    settled = facts.settled()
    found = []
    for key in sorted(facts.here):
        if key not in settled:
            sizes = rounded_range(*size_class_range(key.size_class))
            found.append(f"{key.collective.name}, {key.phase.name}, {sizes}")
    return found


def _us(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e3:,.2f} ms" if value >= 1000 else f"{value:,.1f} µs"
