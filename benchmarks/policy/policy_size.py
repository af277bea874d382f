"""How large the policy is: modules, lines and named constants of all that decides.

    python -m benchmarks policy_size [--json]

Counted is everything below tuner/learning but `explaining`, which writes decisions down and tells them: choice, guard,
change detection, and what joins them. A named constant is a name in capitals that a module or a class sets to something
with a number in it; fields of BrainSettings and Kernel count, too.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lib.reporting import Result, report

POLICY = Path(__file__).parents[2] / "tuner" / "learning"
IN_CAPITALS = re.compile(r"_?[A-Z][A-Z0-9_]*")
SETTINGS_CLASSES = ("BrainSettings", "Kernel")
LIMITS = {"policy_modules": 15, "policy_lines": 3500, "policy_constants": 90}
"""What one person can hold in their head: the aim that was set for the redesign."""
REACHED = {"policy_modules": 15, "policy_lines": 4504, "policy_constants": 87}
"""What it is by now: a test lets it shrink only. What it would cost to come nearer is in docs/design/choice.md."""


def modules() -> list[Path]:
    """Every file that holds code."""
    every = (path for path in POLICY.rglob("*.py") if path.name != "__init__.py")
    return sorted(path for path in every if path.parent.name != "explaining")


def constants(source: str) -> Iterator[str]:
    """Names of the constants in one module's source."""
    tree = ast.parse(source)
    yield from _named(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _named(node.body, every=node.name in SETTINGS_CLASSES)


def _named(body: list[ast.stmt], *, every: bool = False) -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None or not _has_number(node.value):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and (every or IN_CAPITALS.fullmatch(target.id)):
                yield target.id


def _has_number(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)
        for node in ast.walk(value)
    )


def sizes() -> dict[str, int]:
    """The figures by metric."""
    sources = [path.read_text() for path in modules()]
    return {
        "policy_modules": len(sources),
        "policy_lines": sum(len(source.splitlines()) for source in sources),
        "policy_constants": sum(1 for source in sources for _ in constants(source)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    units = {"policy_modules": "modules", "policy_lines": "lines", "policy_constants": "constants"}
    results = [Result(name, value, units[name], f"<= {LIMITS[name]}") for name, value in sizes().items()]
    report("policy_size", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
