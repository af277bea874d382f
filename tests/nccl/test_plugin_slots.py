"""Whose places our plugin takes, and what it is told of them."""

from __future__ import annotations

import pytest

from zerotune.agent.nccl.other_plugins import TUNER, give_back, left_out, take_places

OURS = "/x/libnccl-tuner-zerotune.so"
NO_FILE = {"NCCL_CONF_FILE": "/nowhere"}


def after(*, searches: bool = True, **environment: str) -> tuple[str | None, str | None]:
    """The tuner that NCCL is told, and the one that ours is told."""
    environment = NO_FILE | environment
    take_places(environment, OURS, searches=searches)
    return environment.get(TUNER.variable), environment.get(TUNER.next_variable)


def test_the_other_is_written_down() -> None:
    assert after() == (OURS, "")
    assert after(searches=False) == (OURS, None)
    for value in ("/opt/other.so", "ofi", "STATIC_PLUGIN", "none"):
        assert after(NCCL_TUNER_PLUGIN=value) == (OURS, value)
        assert after(NCCL_TUNER_PLUGIN=value, searches=False) == (OURS, value)


def test_what_is_set_after_launch_counts() -> None:
    environment = dict(NO_FILE)
    take_places(environment, OURS, searches=True)
    environment["NCCL_TUNER_PLUGIN"] = "late.so"
    take_places(environment, OURS, searches=True)
    assert environment["NCCL_TUNER_PLUGIN"] == OURS
    assert environment["ZEROTUNE_NEXT_TUNER"] == "late.so"


@pytest.mark.parametrize("named", [{}, {"NCCL_TUNER_PLUGIN": "ofi"}, {"NCCL_PROFILER_PLUGIN": "inspector"}])
def test_places_are_given_back_where_ours_cannot_be_loaded(named: dict[str, str]) -> None:
    environment = NO_FILE | named
    give_back(environment)
    assert environment == NO_FILE | named
    take_places(environment, OURS, searches=True)
    give_back(environment)
    assert environment == NO_FILE | named


class Loaded:
    """Our plugin after NCCL loaded it, with the other plugins that it opened."""

    def __init__(self, tuner: str = "", profiler: str = "", profiler_abi: int = 6) -> None:
        self.next_tuner, self.next_profiler = (lambda: tuner), (lambda: profiler)
        self.tuner_abi, self.profiler_abi = (lambda: 6), (lambda: profiler_abi)


def test_what_was_named_in_vain_is_told() -> None:
    environment = NO_FILE | {"NCCL_TUNER_PLUGIN": "ofi", "NCCL_PROFILER_PLUGIN": "inspector"}
    take_places(environment, OURS, searches=True)
    both = ["NCCL_TUNER_PLUGIN=ofi", "NCCL_PROFILER_PLUGIN=inspector"]
    assert list(left_out(environment, Loaded())) == both
    assert list(left_out(environment, Loaded(tuner="x"))) == both[1:]
    assert list(left_out(environment, Loaded(tuner="x", profiler_abi=0))) == []  # NCCL 2.22 has no profilers
    assert list(left_out(NO_FILE, Loaded())) == []
