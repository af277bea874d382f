"""`python -m benchmarks` lists the benchmarks, `python -m benchmarks NAME [OPTIONS]` runs one."""

from __future__ import annotations

import ast
import runpy
import signal
import sys
from pathlib import Path

HERE = Path(__file__).parent


def programs() -> dict[str, Path]:
    """Every benchmark by its name: the files that can be run, except those that other benchmarks start."""
    return {
        path.stem: path
        for path in sorted(HERE.glob("[!_]*/**/[!_]*.py"))
        if "__main__" in path.read_text() and not path.stem.endswith("_worker") and path.stem != "rank"
    }


def module_of(name: str) -> str:
    """Raises KeyError if no benchmark has this name."""
    return ".".join(("benchmarks", *programs()[name].relative_to(HERE).with_suffix("").parts))


def main() -> None:
    known = programs()
    if len(sys.argv) > 1 and sys.argv[1] in known:
        name = sys.argv[1]
        sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # its children end with it
        runpy.run_module(module_of(name), run_name="__main__", alter_sys=True)
        return
    if len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help"):
        print(f"no benchmark is called {sys.argv[1]!r}; `python -m benchmarks` lists them", file=sys.stderr)
        raise SystemExit(2)
    for area in sorted({path.parent for path in known.values()}):
        print(f"{area.relative_to(HERE)}/")
        for name, path in known.items():
            if path.parent == area:
                summary = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
                print(f"  {name:24s} {summary}")


if __name__ == "__main__":
    main()
