from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from emulated_pair import Pair
from emulated_world import World

from benchmarks.lib.nccl import nccl_releases
from zerotune.agent.nccl import compiled


@pytest.fixture(scope="session")
def model_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Four ranks with the plugin loaded and no plan, on our model of NCCL; slow to start, so shared by all tests."""
    with _world(tmp_path_factory.mktemp("model"), ZEROTUNE_NCCL_HOST="model") as world:
        yield world


@pytest.fixture(scope="module")
def library_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The same on NCCL's own library; not longer than a file, so that a rank that dies takes no other file along."""
    release = nccl_releases.TESTED[-1]
    library = nccl_releases.library_of(release)
    if not library.exists():
        pytest.skip(f"NCCL {release} was not fetched: python -m benchmarks nccl_releases {release}")
    folder = tmp_path_factory.mktemp("library")
    with _world(folder, ZEROTUNE_NCCL_HOST="library", NCCL_LIBRARY=str(library)) as world:
        yield world


@pytest.fixture(params=["model_world", "library_world"])
def world(request: pytest.FixtureRequest) -> World:
    """One after the other: what holds on both hosts."""
    world: World = request.getfixturevalue(request.param)
    return world


@contextmanager
def _world(folder: Path, **host: str) -> Iterator[World]:
    plugin = str(compiled.PLUGIN.build())
    world = World(
        4, folder, ZEROTUNE_FABRIC="ethernet_boxes", ZEROTUNE_COMPUTE="none",
        NCCL_TUNER_PLUGIN=plugin, NCCL_PROFILER_PLUGIN=plugin, **host,
    )  # fmt: skip
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Makes both ranks of a communicator in this process, after setting environment variables."""
    made = Pair(monkeypatch)
    yield made
    made.close()
