"""`make wheel`, whole: it downloads its tools, and they have the last word on what it made."""

import os
import re
import sys
import zipfile

import pytest
from builds import Environment, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_one_wheel_for_old_linux_one_for_any_platform_and_the_sources(sources, tmp_path):
    run("make", "wheel", f"PYTHON={sys.executable}", cwd=sources)
    files = sorted(path.name for path in (sources / "dist").iterdir())
    assert [re.sub(r"^zerotune-[\d.]+\d", "", name) for name in files] == [
        "-py3-none-any.whl",
        "-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",  # the first is the second's older name
        ".tar.gz",
    ]
    with zipfile.ZipFile(sources / "dist" / files[1]) as wheel:
        assert len([name for name in wheel.namelist() if name.endswith(".so")]) == 3
    environment = Environment(tmp_path / "e")
    environment.install(sources / "dist" / files[1])
    environment.lend_packages()
    command = [environment.python.parent / "zerotune", "launch", "--fabric", "ethernet_boxes", "--", "true"]
    run(*command, env={**os.environ, "CC": "no-such-compiler"})


def test_a_wheel_without_its_libraries_is_not_made(sources):
    run("make", "wheel", f"PYTHON={sys.executable}", "CC=false", cwd=sources, exit_code=2)
