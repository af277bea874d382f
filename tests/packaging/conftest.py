"""Each kind of distribution is built once."""

import pytest
from builds import build, copy_sources


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    return copy_sources(tmp_path_factory.mktemp("checkout") / "zerotune")


@pytest.fixture(scope="session")
def built(sources, tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = build(kind, sources, tmp_path_factory.mktemp("built") / kind)
        return made[kind]

    return of
