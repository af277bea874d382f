"""pip takes away all that came, and what was made in between."""

import os

import pytest
from builds import Environment, run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "pure", "editable"])
def test_uninstalling_leaves_nothing(built, tmp_path, kind):
    environment = Environment(tmp_path / "e")
    before = environment.files()
    environment.install(built(kind))
    environment.lend_packages()
    # Asks for the plugin, which the pure wheel does not bring, and leaves compiled Python behind.
    cache = tmp_path / "cache"
    names = {**os.environ, "XDG_CACHE_HOME": str(cache), "ZEROTUNE_RUNTIME_DIR": str(tmp_path / "r")}
    zerotune = environment.folder / "bin" / "zerotune"
    run(zerotune, "launch", "--fabric", "ethernet_boxes", "--", "true", env=names)
    assert bool(list(cache.rglob("*.so"))) is (kind == "pure")
    environment.take_packages_back()
    environment.uninstall()
    assert environment.files() - before == set()
