"""What is in the wheels and in the source distribution, and what they say of themselves."""

import os
import re
import sys
import tarfile
import zipfile

import pytest
from builds import CHECKOUT, Environment, build, run

LIBRARIES = {
    "zerotune/agent/nccl/plugin/libnccl-tuner-zerotune.so",
    "zerotune/agent/nccl/emulated/libzerotune-emulated.so",
    "zerotune/agent/nccl/mock_cuda/libzerotune-mock-cuda.so",
}


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def unpacked_sdist(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist")) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (root,) = folder.iterdir()
    return root


def test_the_platforms_wheel_brings_both_libraries_and_the_pure_one_none(built):
    assert names(built("wheel")) >= LIBRARIES
    assert names(built("pure")) == names(built("wheel")) - LIBRARIES
    assert built("pure").name.endswith("-py3-none-any.whl")
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", built("wheel").name)


@pytest.mark.parametrize("kind", ["pure", "editable"])
def test_an_installation_lets_the_agent_in_where_the_environment_is_not_looked_at(built, tmp_path, kind):
    environment = Environment(tmp_path / "e")
    environment.install(built(kind))
    environment.lend_packages()
    script = "import sys; print('zerotune.agent.bootstrap' in sys.modules, 'zerotune' in sys.modules)"
    names = {name: value for name, value in os.environ.items() if not name.startswith(("ZEROTUNE_", "NCCL_"))}
    assert run(environment.python, "-I", "-c", script, env=names).stdout.split() == ["False", "False"]
    for variable in ("ZEROTUNE_LAUNCH", "NCCL_ZEROTUNE"):
        found = run(environment.python, "-I", "-c", script, env=names | {variable: "1"}).stdout.split()
        assert found == ["True", "True"], variable


def test_the_libraries_are_compiled_with_the_standard_library_alone():
    """A build has an environment of its own, without our dependencies."""
    script = f"import sys; sys.path.insert(0, {str(CHECKOUT / 'src')!r}); import zerotune.agent.nccl.compiled"
    run(sys.executable, "-I", "-S", "-c", script)


def test_every_source_in_c_is_in_the_wheels(built):
    sources = {file for pattern in ("*.c", "*.h") for file in (CHECKOUT / "agent").rglob(pattern)}
    assert {f"zerotune/{file.relative_to(CHECKOUT)}" for file in sources} <= names(built("pure"))


def test_the_libraries_load_on_old_linux(built):
    """`make wheel` promises manylinux_2_17; auditwheel says the same there."""
    with zipfile.ZipFile(built("wheel")) as archive:
        for name in LIBRARIES:
            needed = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", archive.read(name))}
            assert max(needed) <= 17, name


def test_nothing_but_the_package_is_in_a_wheel(built):
    assert {name.split("/")[0].split("-")[0] for name in names(built("wheel"))} == {"zerotune"}
    assert not [name for name in names(built("wheel")) if re.search(r"\.pyc$|\.lock$|/tests/|/benchmarks/", name)]


def test_files_of_an_earlier_build_are_not_in_the_next(sources, built, tmp_path):
    expected = names(built("pure"))
    stale = [sources / "build/lib/zerotune/tuner/gone.py", *(sources / name.partition("/")[2] for name in LIBRARIES)]
    for file in stale:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    try:
        assert names(build("pure", sources, tmp_path / "dist")) == expected
    finally:
        for file in stale:
            file.unlink(missing_ok=True)


def test_building_needs_no_compiler(sources, built, tmp_path):
    wheel = build("wheel", sources, tmp_path / "dist", CC="no-such-compiler")
    assert names(wheel) == names(built("pure"))


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(built, unpacked_sdist, tmp_path):
    assert names(build("wheel", unpacked_sdist, tmp_path / "dist")) == names(built("wheel"))
