"""The judge of step times finds what the host's clock puts under the wrong plan, and nothing wrong with events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.agent.first_contact import READINGS, TESTS, rehearsed, told_steps
from benchmarks.lib.reporting import Result, report
from benchmarks.rehearse.outcomes import Outcome, Outcomes


@pytest.mark.parametrize("host_ahead", [0, 1, 3])
def test_steps_are_misattributed_by_the_host_alone(host_ahead: int) -> None:
    off, n_wrong, n_lost = told_steps(host_ahead, has_events=True)
    assert off.max() < 0.001
    assert (n_wrong, n_lost) == (0, 0)
    _, n_by_host, _ = told_steps(host_ahead, has_events=False)
    assert n_by_host > 1000 if host_ahead else n_by_host == 0


def told_of_rehearsals(outcomes: Outcomes, capsys) -> float | None:
    """As whoever reads the line of JSON has it."""
    report("first_contact", list(rehearsed(outcomes)), as_json=True)
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["metric"] == "rehearsal_cases_ok_share"
    return found["value"]


def test_of_the_cases_that_were_rehearsed_last_outcomes_count_and_without_any_the_share_is_unknown(
    tmp_path: Path, capsys
) -> None:
    outcomes = Outcomes(tmp_path / "outcomes.jsonl", afresh=False)
    assert told_of_rehearsals(outcomes, capsys) is None
    for case, outcome in [("ddp", "failed"), ("ddp", "ok"), ("fsdp2", "ok"), ("zero3", "failed"), ("titan", "skipped")]:
        outcomes.add(Outcome("2.9.1", case, outcome))
    again = Outcomes(tmp_path / "outcomes.jsonl", afresh=False)
    assert told_of_rehearsals(again, capsys) == pytest.approx(2 / 3)


def test_what_is_unknown_is_neither_met_nor_missed_when_it_is_read_again() -> None:
    assert Result("share", None, "", "1").is_met is None


@pytest.mark.parametrize("test", sorted({test for tests in READINGS.values() for test in tests}))
def test_the_tests_of_what_a_gpu_does_are_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert (TESTS / path).exists()
    assert f"def {name.partition('[')[0]}(" in (TESTS / path).read_text() if name else True
