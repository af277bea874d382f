"""Both libraries in C are compiled when need be, and never where pip would leave them behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zerotune.agent.nccl import compiled
from zerotune.agent.nccl.compiled import EMULATED_NCCL, PLUGIN, SharedLibrary, may_hold_builds
from zerotune.store.errors import PluginError


@pytest.fixture(params=[EMULATED_NCCL], ids=lambda library: library.name)
def library(request, tmp_path, monkeypatch) -> SharedLibrary:
    """A library whose sources a test may spoil, and a cache of its own; the one that is compiled sooner, or any."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copied(request.param, tmp_path / "nccl")


any_library = pytest.mark.parametrize(
    "library", [PLUGIN, EMULATED_NCCL], ids=lambda library: library.name, indirect=True
)


def copied(library: SharedLibrary, root: Path) -> SharedLibrary:
    for folder in ("plugin", "emulated"):
        shutil.copytree(library.root / folder, root / folder, ignore=shutil.ignore_patterns("*.so", "*.lock", "*.py"))
    return replace(library, root=root)


def one_source(library: SharedLibrary) -> Path:
    return next(library.root.glob(library.sources[0]))


@any_library
def test_a_changed_source_is_built_anew(library):
    assert library.path() is None
    first = library.build()
    assert first == library.root / library.file
    inode = first.stat().st_ino
    assert library.build().stat().st_ino == inode
    with one_source(library).open("a") as source:
        source.write("\n/* changed */\n")
    assert library.path() is None
    assert library.build().stat().st_ino != inode
    assert {file.name for file in first.parent.glob("*.so*")} == {first.name, f".{first.name}.lock"}


@any_library
def test_without_a_compiler_the_remedy_is_named(library, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PluginError, match="gcc"):
        library.build()
    monkeypatch.setenv("CC", "no-such-cc -m64")
    with pytest.raises(PluginError, match="CC names no-such-cc"):
        library.build()


def test_a_compiler_that_fails_is_quoted(library):
    one_source(library).write_text("#error spoilt\n")
    with pytest.raises(PluginError, match=r"(?s)failed: .*spoilt.*install gcc"):
        library.build()
    assert not list(library.root.rglob("*.so"))


@pytest.mark.parametrize(("parts", "may"), [("checkout/agent", True), ("lib/python3.11/site-packages/agent", False)])
def test_an_installation_holds_what_pip_put_there_and_nothing_else(tmp_path, parts, may):
    folder = tmp_path / parts
    folder.mkdir(parents=True)
    assert may_hold_builds(folder) is may


def test_an_installed_library_is_compiled_into_the_users_cache(library, tmp_path):
    installed = copied(library, tmp_path / "site-packages" / "nccl")
    before = {*installed.root.rglob("*")}
    built = installed.build()
    assert built.is_relative_to(tmp_path / "cache" / "zerotune")
    assert installed.path() == installed.build() == built
    assert {*installed.root.rglob("*")} == before


def test_read_only_sources_are_built_in_the_cache(library, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled.os, "access", lambda path, mode: library.root not in Path(path).parents)
    assert library.build().is_relative_to(tmp_path / "cache")
    assert library.path() == library.build()


def test_nowhere_to_write_is_said(library, tmp_path, monkeypatch):
    monkeypatch.setattr(compiled.os, "access", lambda path, mode: False)
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(PluginError, match="XDG_CACHE_HOME"):
        library.build()


def test_processes_may_build_at_once(library):
    script = (
        "import ctypes, sys; from pathlib import Path; from dataclasses import replace;"
        "from zerotune.agent.nccl.compiled import EMULATED_NCCL;"
        "built = replace(EMULATED_NCCL, root=Path(sys.argv[1])).build();"
        "print(ctypes.CDLL(str(built)).zerotune_source_hash is not None)"
    )
    command = [sys.executable, "-c", script, str(library.root)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in running] == ["True\n"] * 3
