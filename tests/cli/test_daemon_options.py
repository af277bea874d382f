"""`zerotune daemon`: what people set is what brains get."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from benchmarks.lib.command_line import zerotune
from zerotune.store.job_options import NO_OPTIONS, JobOptions
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import DaemonOptions
from zerotune.tuner import cli
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.explaining.shadow import ShadowBrain
from zerotune.tuner.service import daemon
from zerotune.tuner.service.absent_jobs import AbsentJobs


class Served(Exception):
    """In place of a daemon that runs."""


Settings = partial(BrainSettings, control_share=0.001)  # as in every daemon that people start


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ((), Settings()),
        (("--budget-percent", "2.5"), Settings(budget_fraction=0.025)),
        (("--budget-percent", "100", "--memory-threshold", "1"), Settings(1.0, 1.0)),
        (("--memory-threshold", "0.8"), Settings(memory_threshold=0.8)),
        (("--memory-threshold", "80%"), Settings(memory_threshold=0.8)),
        (("--no-explore",), Settings(explore=False)),
        (("--shadow",), Settings(shadow=True)),
        (("--tune-for", "50", "--compare", "80"), Settings(tune_steps=50, compare_steps=80)),
    ],
)
def test_options_are_the_settings_of_its_brains_and_told_by_status(words, meant, tmp_path: Path, monkeypatch):
    made: list[Brain] = []
    told: list[DaemonOptions | None] = []

    def service(store, brains, *_):
        made.append(brains("job", "fabric", {}, None, NO_OPTIONS))
        made.append(brains("job", "fabric", {}, None, JobOptions(shadow=True, tune_steps=77)))
        return SimpleNamespace(learning=SimpleNamespace(), jobs=tuple, job_ids=(), absent_jobs=AbsentJobs(time.time))

    class Daemon(daemon.Daemon):
        def run(self, idle_exit_s=None):
            told.append(self._describe(0, 0).options)
            raise Served

    monkeypatch.setattr("zerotune.tuner.service.serving.Service", service)
    monkeypatch.setattr("zerotune.tuner.service.serving.Daemon", Daemon)
    endpoint = f"ipc://{tmp_path}/d.sock"
    monkeypatch.setattr(
        sys, "argv", ["zerotune", "daemon", "--endpoint", endpoint, "--store", str(tmp_path / "s.db"), *words]
    )
    tmp_path.chmod(0o700)
    with pytest.raises(Served):
        cli.main()
    assert made[0].settings == meant
    assert made[1].settings == structs.replace(meant, shadow=True, tune_steps=77), "and what a job was told is its own"
    assert isinstance(made[1], ShadowBrain)
    assert told == [meant.options()]
    assert isinstance(made[0], ShadowBrain) == meant.shadow
    assert made[0].budget.fraction == (meant.budget_fraction if meant.explore else 0.0)
    Store.open(tmp_path / "s.db").close()  # given back


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--idle-exit", "0"), "--idle-exit 0 is too small; give 0.01 or more"),
        (("--retention-days", "many"), "--retention-days 'many' is no whole number; give one"),
        (("--memory-threshold", "much"), "'much' is no number; write one, or 1%"),
        (("--numerics", "some"), "'some' is not one of 'any', 'exact';"),
    ],
)
def test_a_value_that_cannot_be_is_told_in_one_plain_sentence(words, told):
    done = zerotune("daemon", *words)
    assert done.code == 2
    assert told in done.err
    assert "nput" not in done.err
