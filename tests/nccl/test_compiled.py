"""Both libraries in C are compiled when need be, and never where pip would leave them behind."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zerotune.agent.nccl import compiled
from zerotune.agent.nccl.compiled import EMULATED_NCCL, SharedLibrary, may_hold_builds
from zerotune.store.errors import PluginError


@pytest.fixture
def library(tmp_path, monkeypatch) -> SharedLibrary:
    """A library whose sources a test may spoil, and a cache of its own: the library that is compiled sooner."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copied(EMULATED_NCCL, tmp_path / "nccl")


def copied(library: SharedLibrary, root: Path) -> SharedLibrary:
    for folder in ("plugin", "emulated"):
        shutil.copytree(library.root / folder, root / folder, ignore=shutil.ignore_patterns("*.so", "*.lock", "*.py"))
    return replace(library, root=root)


def one_source(library: SharedLibrary) -> Path:
    return next(library.root.glob(library.sources[0]))


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


def planted(library: SharedLibrary, cache: Path) -> Path:
    """A library that bears the hash of the sources, where ours would be."""
    built = library.build()
    assert built.is_relative_to(cache)
    return built


@pytest.fixture
def installed(library, tmp_path) -> SharedLibrary:
    return copied(library, tmp_path / "site-packages" / "nccl")


@pytest.mark.parametrize("how", ["open", "of another user"])
def test_a_library_that_others_could_have_put_into_the_cache_is_not_loaded(installed, tmp_path, how):
    if how == "of another user" and os.getuid() != 0:
        pytest.skip("gives a file to another user: needs root")
    built = planted(installed, tmp_path / "cache")
    for place in (tmp_path / "cache", built.parent.parent, built.parent, built):
        mode, owner = place.stat().st_mode, place.stat().st_uid
        place.chmod(0o777) if how == "open" else os.chown(place, 25_001, 25_001)
        assert installed.path() is None
        if place == built:  # nobody else may put one there, so it is built anew
            assert installed.build() == built == installed.path()
            continue
        with pytest.raises(PluginError, match=str(place)):
            installed.build()
        place.chmod(mode) if how == "open" else os.chown(place, owner, owner)
        assert installed.path() == built


def test_a_link_of_another_user_on_the_way_is_not_followed(installed, tmp_path):
    if os.getuid() != 0:
        pytest.skip("gives a link to another user: needs root")
    planted(installed, tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "real")
    (tmp_path / "cache").symlink_to("real")
    assert installed.path() is not None, "a link of one's own is"
    os.lchown(tmp_path / "cache", 25_001, 25_001)
    assert installed.path() is None


def test_a_link_in_the_place_of_the_lock_leaves_its_target_as_it_is(installed, tmp_path):
    built = planted(installed, tmp_path / "cache")
    built.unlink()
    lock = built.with_name(f".{built.name}.lock")
    lock.unlink()
    (tmp_path / "precious").write_text("data")
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(PluginError):
        installed.build()
    assert (tmp_path / "precious").read_text() == "data"


def test_a_pipe_in_the_place_of_a_library_is_not_waited_for(installed, tmp_path):
    built = planted(installed, tmp_path / "cache")
    built.unlink()
    os.mkfifo(built, 0o600)
    assert installed.path() is None
    assert installed.build() == built == installed.path()


def test_a_file_system_without_locks_holds_a_cache(installed, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert planted(installed, tmp_path / "cache") == installed.path()


def test_the_cache_is_closed_to_others_whatever_the_umask(installed, tmp_path):
    umask = os.umask(0)
    try:
        built = planted(installed, tmp_path / "cache")
    finally:
        os.umask(umask)
    assert [one.stat().st_mode & 0o777 for one in (built.parent, built.parent.parent)] == [0o700, 0o700]
