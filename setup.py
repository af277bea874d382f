"""Maps the top-level folders to one import name, and builds the tuner plugin into the wheel where there is a compiler.

All else is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOMS = ("agent", "store", "tuner", "zero_runtime")
PURE = os.environ.get("ZEROTUNE_PURE_WHEEL") == "1"  # a wheel for any platform, without the plugin
PACKAGES = ["zerotune"] + [
    f"zerotune.{name}" for room in ROOMS for name in (room, *(f"{room}.{below}" for below in find_packages(room)))
]


class BuildWithPlugin(build_py):
    """Adds the compiled plugin beside its sources; without a compiler the sources alone go in."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # what an earlier build left would go into the wheel
        super().run()
        if self.editable_mode or PURE:
            return  # built on first use
        # library.py knows how, and marks the library with the hash of its sources.
        command = [sys.executable, "-c", "from zerotune.agent.nccl import library; library.build(force=True)"]
        done = subprocess.run(command, cwd=self.build_lib, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            print(f"the tuner plugin is not in this wheel ({reason}); it is built on first use", file=sys.stderr)
        for lock in Path(self.build_lib).rglob(".*.lock"):
            lock.unlink()


class PlatformWheel(bdist_wheel):
    """The wheel holds a library of this platform, but no Python extension."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class WithLibrary(Distribution):
    """Tells setuptools that the result is not pure Python."""

    def has_ext_modules(self) -> bool:
        return not PURE


setup(
    packages=PACKAGES,
    package_dir={"zerotune": "zerotune", **{f"zerotune.{room}": room for room in ROOMS}},
    cmdclass={"build_py": BuildWithPlugin, "bdist_wheel": PlatformWheel},
    distclass=WithLibrary,
)
