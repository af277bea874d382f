"""Whose places our plugin takes, and what it is told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.agent.nccl.compiled import PLUGIN
from zerotune.agent.nccl.other_plugins import PROFILER, TUNER, restore_variables, set_variables, unloaded, user_plugins

OURS = "/x/libnccl-tuner-zerotune.so"
NO_FILE = {"NCCL_CONF_FILE": "/nowhere"}


def after(*, searches: bool = True, **environment: str) -> tuple[str | None, str | None]:
    """The tuner that NCCL is told, and the one that ours is told."""
    environment = NO_FILE | environment
    set_variables(environment, OURS, searches=searches)
    return environment.get(TUNER.variable), environment.get(TUNER.next_variable)


def test_the_other_is_written_down() -> None:
    assert after() == (OURS, "")
    assert after(searches=False) == (OURS, None)
    for value in ("/opt/other.so", "ofi", "STATIC_PLUGIN", "none"):
        assert after(NCCL_TUNER_PLUGIN=value) == (OURS, value)
        assert after(NCCL_TUNER_PLUGIN=value, searches=False) == (OURS, value)


@pytest.mark.parametrize(
    "name", [OURS, "/other/environment/libnccl-tuner-zerotune.so", Path(PLUGIN.file).name, "zerotune"]
)
def test_ours_is_no_other(name: str) -> None:
    assert after(NCCL_TUNER_PLUGIN=name) == (OURS, "")
    # as a rank's own children find it
    assert after(NCCL_TUNER_PLUGIN=name, ZEROTUNE_NEXT_TUNER="ofi") == (OURS, "ofi")


def test_a_plugin_named_after_launch_counts() -> None:
    environment = dict(NO_FILE)
    set_variables(environment, OURS, searches=True)
    environment["NCCL_TUNER_PLUGIN"] = "late.so"
    set_variables(environment, OURS, searches=True)
    assert environment["NCCL_TUNER_PLUGIN"] == OURS
    assert environment["ZEROTUNE_NEXT_TUNER"] == "late.so"


def test_nccls_own_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("#NCCL_TUNER_PLUGIN=no\nNCCL_DEBUG\nNCCL_TUNER_PLUGIN=/opt/a=b.so\nNCCL_TUNER_PLUGIN=later\n")
    assert after(NCCL_CONF_FILE=str(file)) == (OURS, "/opt/a=b.so")
    assert after(NCCL_CONF_FILE=str(file), NCCL_TUNER_PLUGIN="x") == (OURS, "x")


def test_both_places_are_taken() -> None:
    environment = NO_FILE | {"NCCL_PROFILER_PLUGIN": "inspector"}
    set_variables(environment, OURS, searches=True)
    assert environment[PROFILER.variable] == environment[TUNER.variable] == OURS
    assert environment[PROFILER.next_variable] == "inspector"
    assert environment[TUNER.next_variable] == ""


@pytest.mark.parametrize("named", [{}, {"NCCL_TUNER_PLUGIN": "ofi"}, {"NCCL_PROFILER_PLUGIN": "inspector"}])
def test_places_are_given_back_where_ours_cannot_be_loaded(named: dict[str, str]) -> None:
    environment = NO_FILE | named
    restore_variables(environment)
    assert environment == NO_FILE | named
    set_variables(environment, OURS, searches=True)
    restore_variables(environment)
    assert environment == NO_FILE | named


class Loaded:
    """Our plugin after NCCL loaded it, with the other plugins that it opened."""

    def __init__(self, tuner: str = "", profiler: str = "", profiler_abi: int = 6) -> None:
        self.next_tuner, self.next_profiler = (lambda: tuner), (lambda: profiler)
        self.tuner_abi, self.profiler_abi = (lambda: 6), (lambda: profiler_abi)


def test_a_plugin_named_in_vain_is_told() -> None:
    environment = NO_FILE | {"NCCL_TUNER_PLUGIN": "ofi", "NCCL_PROFILER_PLUGIN": "inspector"}
    set_variables(environment, OURS, searches=True)
    both = ["NCCL_TUNER_PLUGIN=ofi", "NCCL_PROFILER_PLUGIN=inspector"]
    assert list(unloaded(environment, Loaded())) == both
    assert list(unloaded(environment, Loaded(tuner="x"))) == both[1:]
    assert list(unloaded(environment, Loaded(tuner="x", profiler_abi=0))) == []  # NCCL 2.22 has no profilers
    assert list(unloaded(NO_FILE, Loaded())) == []


def test_others_are_named() -> None:
    named = {"NCCL_TUNER_PLUGIN": "ofi", "NCCL_PROFILER_PLUGIN": "inspector"}
    assert dict(user_plugins(NO_FILE | named)) == {TUNER: "ofi", PROFILER: "inspector"}
    assert dict(user_plugins(NO_FILE | {"NCCL_TUNER_PLUGIN": "none"})) == {}
