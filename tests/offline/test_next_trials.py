"""`zerotune explain --next`: what would be tried next, by the policy's own rule."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from zerotune.store.records import Collective, CommunicatorClass, DecisionKey, Phase
from zerotune.tuner.offline.explaining.next_trials import next_trials, render_next
from zerotune.tuner.offline.explaining.values import Explanation


def alternative(candidate: str, us: float, high_us: float, n_calls: int = 0) -> dict[str, Any]:
    return {
        "candidate": candidate, "predicted_us": us, "predicted_low_us": us * us / high_us, "predicted_high_us": high_us,
        "n_this_job": n_calls,
    }  # fmt: skip


def key(calls_per_step: float, *alternatives: dict[str, Any]) -> Explanation:
    where = DecisionKey(CommunicatorClass(8, 1), Collective.all_gather, Phase.other, 80)
    return Explanation(
        where, "all_gather", "other", 1 << 20, 1 << 20, None, list(alternatives), is_guess=False, decided_at_s=None,
        n_explored=0, spent_us=0.0, history=[], setting="baseline", calls_per_step=calls_per_step,
    )  # fmt: skip


def test_the_most_promising_trial_comes_first() -> None:
    known = alternative("baseline", 100, 101, 9), alternative("ring/ll/4ch", 100, 140), alternative("tree", 300, 310)
    seldom, often = (key(n, *known) for n in (1.0, 5.0))
    found = next_trials([seldom, often])
    assert [one.candidate for one in found] == ["ring/ll/4ch"] * 2
    assert found[0].worth_us == 5 * found[1].worth_us > 0


def test_tried_and_surely_slower_settings_promise_nothing() -> None:
    ran = alternative("ring/ll/4ch", 90, 91, 4)
    assert next_trials([key(1.0, alternative("baseline", 100, 101, 9), ran, alternative("tree", 300, 310))]) == []
    assert next_trials([key(1.0), key(0.0, ran)]) == []


def test_settings_stay_in_one_piece_on_80_columns() -> None:
    found = next_trials([key(5.0, alternative("baseline", 100, 101, 9), alternative("ring/simple/16ch", 100, 140))])
    out = io.StringIO()
    render_next(found, Console(file=out, width=80))
    assert all(words in out.getvalue() for words in ("all_gather", "ring/simple/16ch", "1,048,576", "baseline"))
