"""Compiled files stand beside their sources in a checkout only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from zerotune.agent.nccl.build_folder import may_hold_builds
from zerotune.agent.nccl.emulated import build as emulated


@pytest.mark.parametrize(("parts", "may"), [("checkout/agent", True), ("lib/python3.11/site-packages/agent", False)])
def test_an_installation_holds_what_pip_put_there_and_nothing_else(tmp_path: Path, parts: str, may: bool) -> None:
    sources = tmp_path / parts
    sources.mkdir(parents=True)
    assert may_hold_builds(sources) is may


@pytest.mark.parametrize("cache", ["folder", "file"])
def test_an_installed_emulation_is_compiled_into_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    nccl = tmp_path / "site-packages" / "agent" / "nccl"
    shutil.copytree(Path(emulated.__file__).parent, nccl / "emulated", ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(Path(emulated.__file__).parents[1] / "plugin", nccl / "plugin")
    before = {*tmp_path.rglob("*")}
    if cache == "file":
        (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(emulated, "__file__", str(nccl / "emulated" / "build.py"))
    if cache == "file":
        with pytest.raises(emulated.PluginError, match="XDG_CACHE_HOME"):
            emulated.build()
        return
    library = emulated.build()
    assert library.is_relative_to(tmp_path / "cache")
    assert emulated.build() == library
    assert {one for one in tmp_path.rglob("*") if "cache" not in one.parts} == before
