"""Real daemons and real training processes, as a user would start them."""

import os
import signal

import pytest
from node_world import World


@pytest.fixture
def world(tmp_path_factory):
    # Unix socket paths hold 107 characters at most: pytest's own folders can be longer.
    made = World(tmp_path_factory.mktemp("w"))
    made.runtime.mkdir(mode=0o700)
    yield made
    made.close()


@pytest.fixture
def kill9():
    return lambda pid: os.kill(pid, signal.SIGKILL)
