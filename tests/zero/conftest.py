from __future__ import annotations

from collections.abc import Iterator

import pytest
from zero_world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()
