"""Two runs of a benchmark beside each other."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.lib.reporting import Result
from benchmarks.recording.compare import differences, figures_in
from benchmarks.recording.runs import Recorded


def run(**values: float) -> dict[str, Result]:
    metrics = {name.replace("__", ":").replace("_at_", "@"): value for name, value in values.items()}
    return {name: Result(name, value, "%", "<= 2") for name, value in metrics.items()}


def test_figures_are_paired_by_what_they_were_taken_on() -> None:
    before = run(regret_at_one__ours=1.0, regret_at_two__ours=3.0, regret_at_two__peer=9.0, gone=1.0)
    after = run(regret_at_one__ours=2.5, regret_at_two__ours=1.5, regret_at_two__peer=9.0, new=1.0)
    found = {one.metric: one for one in differences(before, after)}
    assert found["difference:regret@ours"].value == 0.0
    assert found["difference:regret@peer"].value == 0.0
    assert found["figures_in_both"].value == 3
    assert (found["targets_lost"].value, found["targets_won"].value) == (1, 1)
    assert found["targets_lost"].is_met is False
    assert found["lost:regret@one:ours"].value == 2.5


def test_what_json_printed_and_what_was_recorded_are_read_alike(tmp_path: Path) -> None:
    figures = run(regret=1.0)
    printed, recorded, other = tmp_path / "printed", tmp_path / "recorded", tmp_path / "other"
    document = {"benchmark": "any", "results": [asdict(one) for one in figures.values()]}
    printed.write_text(f"progress\n{json.dumps(document)}\n")
    Recorded(tuple(figures.values()), {}, "", "", "", 1.0).save(recorded)
    assert figures_in(str(printed)) == figures_in(str(recorded)) == figures
    other.write_text("{}")
    for path in other, tmp_path / "none":
        with pytest.raises(argparse.ArgumentTypeError, match=str(path)):
            figures_in(str(path))
