"""What `pip install` builds of this checkout, and empty environments to put it into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.so", "build", "dist", "run")
HOOKS = {"wheel": "build_wheel", "pure": "build_wheel", "editable": "build_editable", "sdist": "build_sdist"}


def copy_sources(folder: Path) -> Path:
    """A clean copy of the checkout at `folder`: builds write beside what they build."""
    shutil.copytree(CHECKOUT, folder, symlinks=True, ignore=NOT_SOURCES)
    shutil.copy2(CHECKOUT / ".gitignore", folder)
    return folder


def build(kind: str, sources: Path, into: Path, **environment: str) -> Path:
    """The file that pip would make of `sources` by the build backend's hook, without an environment of its own."""
    into.mkdir(parents=True, exist_ok=True)
    names = {**os.environ, **environment, **({"ZEROTUNE_PURE_WHEEL": "1"} if kind == "pure" else {})}
    run(sys.executable, "-c", BUILD, HOOKS[kind], into, cwd=sources, env=names)
    (built,) = into.iterdir()
    return built


BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


class Environment:
    """A fresh virtual environment. It holds nothing but what `install` puts there."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))

    def install(self, wheel: Path) -> None:
        """Install `wheel` without its dependencies."""
        self._pip("install", "--no-deps", "--no-index", "--no-compile", wheel)

    def uninstall(self) -> None:
        """Remove zerotune as a user does."""
        self._pip("uninstall", "--yes", "zerotune")

    def lend_packages(self) -> None:
        """The dependencies: from now on what the running interpreter can import, after the environment's own."""
        folders = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
        (self.site / LENT).write_text("\n".join(folders))

    def take_packages_back(self) -> None:
        """Undo `lend_packages`: pip must not see another environment's zerotune."""
        (self.site / LENT).unlink()

    def files(self) -> set[Path]:
        """All there is in it."""
        return {*self.folder.rglob("*")}

    def _pip(self, *words: object) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", *words)


LENT = "lent.pth"


def run(*command: object, exit_code: int = 0, **options: object) -> subprocess.CompletedProcess[str]:
    """The finished process, which must have ended with `exit_code`."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300, **options)
    assert done.returncode == exit_code, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done
