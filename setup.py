"""Builds the tuner plugin into the wheel where there is a compiler; all else is in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PLUGIN = Path("agent/nccl/plugin")


class BuildWithPlugin(build_py):
    """Adds the compiled plugin beside its sources; without a compiler the sources alone go in."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # built on first use, beside the sources
        target = Path(self.build_lib) / PLUGIN
        try:
            subprocess.run(["make", "-C", str(target)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"the tuner plugin was not built ({error}); it is built on first use", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The wheel holds a library of this platform, but no Python extension."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class WithLibrary(Distribution):
    """Tells setuptools that the result is not pure Python."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithPlugin, "bdist_wheel": PlatformWheel}, distclass=WithLibrary)
