"""`make test-versions`: does the wheel install and pass `smoke.py` with each Python and each torch that we promise?

Each torch release (its newest patch) with one Python, the oldest with the oldest: not the product, since each is a
fresh environment with a download of gigabytes. One after the other, deleted after use, without a compiler on PATH.
Outcomes go to a JSON file, where those of earlier runs are kept, and from there to a page of the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
DISK_GB = 15
"""What a CUDA build of torch takes, packed and unpacked."""
NOT_TRIED = "not tried"
PAGE = CHECKOUT / "docs" / "reference" / "compatibility.md"
BEGIN, END = "<!-- made by tests/packaging/versions.py -->", "<!-- end of versions -->"
HEADING = """| Python | torch | outcome | date | commit |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one combination."""

    python: str
    torch: str
    outcome: str
    date: str
    commit: str
    duration_s: int


def promised() -> tuple[list[str], tuple[int, int]]:
    """The Python versions and the oldest torch that pyproject.toml names."""
    text = (CHECKOUT / "pyproject.toml").read_text()
    major, minor = re.findall(r'"torch>=(\d+)\.(\d+)"', text)[0]
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text), (int(major), int(minor))


def interpreter(version: str) -> Path | None:
    """A Python of this version that can make environments: on PATH or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    for found in (*map(Path, [on_path] if on_path else []), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        code = "import sys, ensurepip, sqlite3, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([found, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return found
    return None


def torch_releases(python: Path, oldest: tuple[int, int]) -> list[str]:
    """The torch releases on the registry from `oldest` on, as major.minor, the oldest first."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        command = [f"{folder}/bin/python", "-m", "pip", "index", "versions", "torch"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = {(int(major), int(minor)) for major, minor in re.findall(r"\b(\d+)\.(\d+)\.\d+", listed)}
    return [f"{major}.{minor}" for major, minor in sorted(versions) if (major, minor) >= oldest]


def tried(python: Path, torch: str, wheel: Path, folder: Path) -> tuple[str, str]:
    """Install and run the smoke test in `folder`.

    Args:
        python: the interpreter.
        torch: release as major.minor.
        wheel: what is installed.
        folder: empty; gets the environment and all files.

    Returns:
        Version of torch that was installed, and the outcome in one word; what a failure printed goes to stderr.
    """
    made, work = folder / "e", folder / "w"
    work.mkdir()
    environment = {**os.environ, "PATH": str(made / "bin")}
    for name in ("CC", "PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    own = made / "bin" / "python"
    for step, command in (
        ("environment", [python, "-m", "venv", made]),
        ("install", [own, "-m", "pip", "install", "--quiet", "--no-compile", wheel, f"torch=={torch}.*"]),
        ("smoke", [own, SMOKE]),
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=work, env=environment, check=False)
        if done.returncode < 0:
            return torch, f"{NOT_TRIED}: {step} was ended by signal {-done.returncode}"
        if done.returncode != 0:
            print(done.stdout[-4000:], done.stderr[-8000:], sep="\n", file=sys.stderr, flush=True)
            return torch, f"{step} failed"
    version = "import importlib.metadata as m; print(m.version('torch'))"
    return subprocess.run([own, "-c", version], capture_output=True, text=True, check=True).stdout.strip(), "passed"


def run(python: Path, version: str, torch: str, wheel: Path, commit: str) -> Outcome:
    """One combination, in a folder that is gone afterwards."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zerotune-versions-", ignore_cleanup_errors=True) as folder:
        if shutil.disk_usage(folder).free < DISK_GB * 10**9:
            installed, outcome = torch, f"{NOT_TRIED}: less than {DISK_GB} GB free"
        else:
            installed, outcome = tried(python, torch, wheel.resolve(), Path(folder))
    took_s = round(time.monotonic() - started)
    return Outcome(version, installed, outcome, time.strftime("%Y-%m-%d"), commit, took_s)


def table(outcomes: list[Outcome]) -> str:
    """Rows of a Markdown table."""
    return "".join(f"| {one.python} | {one.torch} | {one.outcome} | {one.date} | {one.commit} |\n" for one in outcomes)


def release(outcome: Outcome) -> list[int]:
    """Major and minor of its torch."""
    return [int(part) for part in outcome.torch.split(".")[:2]]


def main() -> int:
    """The exit code: 1 when a combination that was tried has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    which = "only these releases (2.6 2.9 ...), in this order; without any, only the page"
    parser.add_argument("--torch", nargs="*", help=which)
    parser.add_argument("--json", type=Path, default=CHECKOUT / "build" / "versions.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    versions, oldest_torch = promised()
    found = {version: python for version in versions if (python := interpreter(version)) is not None}
    for version in versions:
        if version not in found:
            print(f"no Python {version} here: not tried")
    releases = torch_releases(found[next(reversed(found))], oldest_torch)
    if unknown := {*(options.torch or ())}.difference(releases):
        parser.error(f"no torch {', '.join(unknown)} on the registry; there is {', '.join(releases)}")
    python_of = {torch: list(found)[place * len(found) // len(releases)] for place, torch in enumerate(releases)}
    kept = [Outcome(**one) for one in json.loads(options.json.read_text())] if options.json.exists() else []
    described = ["git", "-C", CHECKOUT, "describe", "--always", "--dirty"]
    commit = subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip()
    n_failed = 0
    for torch in releases if options.torch is None else options.torch:
        version = python_of[torch]
        outcome = run(found[version], version, torch, options.wheel, commit)
        print(f"Python {version}, torch {outcome.torch}: {outcome.outcome}, {outcome.duration_s} s", flush=True)
        n_failed += outcome.outcome != "passed"
        kept = sorted([outcome, *(one for one in kept if release(one) != release(outcome))], key=release)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(one) for one in kept], indent=1) + "\n")
    known = [release(one) for one in kept]
    missing = [Outcome(python_of[torch], torch, NOT_TRIED, "", "", 0) for torch in releases]
    missing = [one for one in missing if release(one) not in known]
    rows = table(sorted([*kept, *missing], key=release))
    before, _, rest = options.page.read_text().partition(BEGIN)
    options.page.write_text(f"{before}{BEGIN}\n{HEADING}{rows}{END}{rest.partition(END)[2]}")
    print("\n" + rows, end="")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
