"""What `zerotune explain` prints: what a figure means, and what there is where nothing fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from store.database import Store
from store.records import BASELINE, Collective, CommunicatorClass, Decision, DecisionKey, Phase, size_class
from tuner import cli
from tuner.explain import why_tried


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "s.db") as opened:
        opened.record_job("job", "fabric", {}, 2)
        for message_bytes, is_guess in ((1 << 20, True), (1 << 24, False)):
            key = DecisionKey(
                CommunicatorClass(2, 1), Collective.all_gather, Phase.forward_gather, size_class(message_bytes)
            )
            one = {"candidate": "baseline", "predicted_us": 9.0, "predicted_low_us": 8.0, "predicted_high_us": 10.0}
            one |= {"is_guess": is_guess, "measured_us": None, "n_measurements": 0, "spent_us": 0.0, "note": ""}
            opened.record_decisions(
                [Decision("job", "fabric", key, BASELINE, 1, "keep", "so", alternatives=json.dumps([one]))]
            )
        opened.flush()
    return tmp_path / "s.db"


def explained(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["zerotune", "explain", *words])
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().out


def test_guesses_and_expectations_have_names_of_their_own(store: Path, monkeypatch, capsys):
    text = explained(monkeypatch, capsys, "--store", str(store))
    assert text.index("guessed us (90 %)") < text.index("expected us (90 %)"), "the smaller message comes first"
    assert "guessed: from the predictions alone" in text


def test_a_size_without_decision_gets_those_there_are(store: Path, monkeypatch, capsys):
    text = explained(monkeypatch, capsys, "--store", str(store), "--message-bytes", "4096")
    assert "No decision fits" in text
    assert "all_gather forward_gather: 1,048,576 to 1,246,974; " in text
    assert "guessed" not in text


def test_a_trial_of_what_is_predicted_slower_says_what_it_may_gain():
    assert "may gain within that interval, up to 20 % of the time" in why_tried(50.0, 60.0, 40.0)
    assert "small chance" in why_tried(50.0, 60.0, 55.0)
    assert why_tried(50.0, 45.0, 40.0) == "", "its prediction is reason enough"
    assert why_tried(None, 60.0, 40.0) == why_tried(50.0, None, None) == ""
