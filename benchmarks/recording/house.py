"""How large the project is: lines by area, named constants, and files that are too long.

python -m benchmarks house [--json]

It counts sources (.py .c .h .js .css .html .toml .sh) that git tracks, without recorded data. The product is agent,
tuner, store, zero_runtime and zerotune. `agent_wheel_lines` are the installed lines of agent/. Constants of the product
are counted as in `policy_size`.
"""

from __future__ import annotations

import os
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import tomllib

from benchmarks.lib.reporting import Result, options_of, report
from benchmarks.policy.policy_size import constants

ROOT = Path(__file__).parents[2]
SOURCES = (".py", ".c", ".h", ".js", ".css", ".html", ".toml", ".sh")
PRODUCT = ("agent", "tuner", "store", "zero_runtime", "zerotune")
LONG_LINES = 400
AIMS = {
    "tuner_lines": 33_000,
    "agent_lines": 18_500,
    "agent_wheel_lines": 14_500,
    "store_lines": 4_400,
    "zero_runtime_lines": 4_500,
    "tests_lines": 38_000,
    "benchmarks_lines": 10_000,
    "constants": 800,
    "files_over_400_lines": 12,
}
REACHED = {
    "tuner_lines": 48_544,
    "agent_lines": 22_897,
    "agent_wheel_lines": 22_897,
    "store_lines": 6_127,
    "zero_runtime_lines": 4_885,
    "tests_lines": 52_270,
    "benchmarks_lines": 21_885,
    "constants": 1_118,
    "files_over_400_lines": 12,
}
"""The present sizes: a test lets them shrink only."""


def tracked(*folders: str) -> list[Path]:
    """The sources below these folders that git tracks, except links to folders."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in listed.stdout.split("\0") if name.endswith(SOURCES))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def installed() -> set[Path]:
    """Every file of the project that a wheel installs, as listed in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    left_out = settings["packages"]["find"].get("exclude", ())
    packages: dict[str, Path] = {}
    for folder, inner, files in os.walk(ROOT / "src" / "zerotune", followlinks=True):
        name = os.path.relpath(folder, ROOT / "src").replace(os.sep, ".")
        if "__init__.py" not in files:
            inner.clear()
        elif not any(fnmatch(name, pattern) for pattern in left_out):
            packages[name] = Path(folder)
    wanted = {name: ["*.py", *settings["package-data"].get(name, ())] for name in packages}
    found = (packages[name].glob(one) for name, patterns in wanted.items() for one in patterns)
    return {path.resolve() for some in found for path in some}


def sizes() -> dict[str, int]:
    lines = {path: len(path.read_text().splitlines()) for path in tracked(*PRODUCT, "tests", "benchmarks")}
    rooms = {path: path.relative_to(ROOT).parts[0] for path in lines}
    product, wheel = [path for path in lines if rooms[path] in PRODUCT], installed()
    found = {f"{room}_lines": 0 for room in (*PRODUCT, "tests", "benchmarks")}
    for path, n in lines.items():
        found[f"{rooms[path]}_lines"] += n
    found["product_lines"] = sum(lines[path] for path in product)
    found["agent_wheel_lines"] = sum(lines[path] for path in product if rooms[path] == "agent" and path in wheel)
    found["constants"] = sum(1 for path in product if path.suffix == ".py" for _ in constants(path.read_text()))
    found["files_over_400_lines"] = sum(lines[path] > LONG_LINES for path in product)
    return {"product_lines": found["product_lines"], **{name: found[name] for name in AIMS}}


def _target(name: str) -> str:
    return f"<= {AIMS[name]}" if name in AIMS else ""


def main() -> None:
    parser = options_of(__doc__)
    arguments = parser.parse_args()
    results = [
        Result(name, value, "files" if name.startswith("files") else name.rpartition("_")[2], _target(name))
        for name, value in sizes().items()
    ]
    report("house", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
