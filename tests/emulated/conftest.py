from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_pair import Pair
from emulated_world import World

from zerotune.agent.nccl import compiled


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four ranks with the plugin loaded and no plan; slow to start, so shared by all tests."""
    plugin = str(compiled.PLUGIN.build())
    made = World(
        4, tmp_path_factory.mktemp("world"), ZEROTUNE_FABRIC="ethernet_boxes", ZEROTUNE_COMPUTE="none",
        NCCL_TUNER_PLUGIN=plugin, NCCL_PROFILER_PLUGIN=plugin,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Makes both ranks of a communicator in this process, after setting environment variables."""
    made = Pair(monkeypatch)
    yield made
    made.close()
