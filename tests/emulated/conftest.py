from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_pair import Pair
from emulated_world import World

from benchmarks.lib import nccl_releases
from zerotune.agent.nccl import compiled


@pytest.fixture(scope="session", params=["model", "library"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four ranks with the plugin loaded and no plan, once on each host; slow to start, so shared by all tests here."""
    plugin = str(compiled.PLUGIN.build())
    host = {"ZEROTUNE_NCCL_HOST": request.param}
    if request.param == "library":
        library = nccl_releases.library_of(nccl_releases.TESTED[0])
        if not library.exists():
            pytest.skip(f"NCCL {nccl_releases.TESTED[0]} was not fetched: python -m benchmarks.lib.nccl_releases")
        host["NCCL_LIBRARY"] = str(library)
    world = World(
        4, tmp_path_factory.mktemp("world"), ZEROTUNE_FABRIC="ethernet_boxes", ZEROTUNE_COMPUTE="none",
        NCCL_TUNER_PLUGIN=plugin, NCCL_PROFILER_PLUGIN=plugin, **host,
    )  # fmt: skip
    yield world
    world.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Makes both ranks of a communicator in this process, after setting environment variables."""
    made = Pair(monkeypatch)
    yield made
    made.close()
