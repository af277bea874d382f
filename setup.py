"""What pyproject.toml cannot say: the libraries in C, a line for site-packages, and a README for other places.

Without a compiler the wheel brings the sources alone, and the libraries are compiled on first use. With
ZEROTUNE_PURE_WHEEL=1 that is what is asked for, and the wheel is for any platform.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

AT_START = """\
import os; ('ZEROTUNE_LAUNCH' in os.environ or 'NCCL_ZEROTUNE' in os.environ) and __import__('zerotune.agent.bootstrap')
"""
"""A line for site-packages that each Python process runs at its start: in a launched job it lets the agent in."""
PURE = os.environ.get("ZEROTUNE_PURE_WHEEL") == "1"
COMPILE = """
from zerotune.agent.nccl.compiled import EMULATED_NCCL, MOCK_CUDA, PLUGIN

for library in (PLUGIN, EMULATED_NCCL, MOCK_CUDA):
    library.compile_to(library.root / library.file)
"""


def readme_without_the_repository() -> str:
    """README.md for readers elsewhere: a link to a file of the repository becomes its text, a picture of it goes."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


class BuildWithLibraries(build_py):
    """Adds the compiled libraries beside their sources, and the line for site-packages."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # what an earlier build left would go into the wheel
        super().run()
        # An editable wheel holds what would be installed, an ordinary one what was built.
        root = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        Path(root).mkdir(parents=True, exist_ok=True)
        Path(root, "zerotune-launch.pth").write_text(AT_START, encoding="utf-8")
        if self.editable_mode or PURE:
            return
        command = [sys.executable, "-B", "-c", COMPILE]
        done = subprocess.run(command, cwd=self.build_lib, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stderr, "the libraries in C are not in this wheel: built on first use", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The wheel holds libraries of this platform, but no Python extension."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class WithLibraries(Distribution):
    """Tells setuptools that the result is not pure Python."""

    def has_ext_modules(self) -> bool:
        return not PURE


setup(
    long_description=readme_without_the_repository(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel},
    distclass=WithLibraries,
)
