from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_pair import Pair
from emulated_world import World

from zerotune.agent.nccl import compiled


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four ranks with the plugin loaded and no plan; slow to start, so shared by all tests here."""
    plugin = str(compiled.PLUGIN.build())
    folder = tmp_path_factory.mktemp("world")
    world = World(
        4, folder, ZEROTUNE_FABRIC="ethernet_boxes", ZEROTUNE_COMPUTE="none",
        NCCL_TUNER_PLUGIN=plugin, NCCL_PROFILER_PLUGIN=plugin,
    )  # fmt: skip
    yield world
    world.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Makes both ranks of a communicator in this process, after setting environment variables."""
    made = Pair(monkeypatch)
    yield made
    made.close()
