"""How large the policy is: modules, lines and named constants of all that decides.

    python -m benchmarks policy_size [--json]

Counted is everything below tuner/learning but `explaining`, which writes decisions down and tells them: choice, guard,
change detection, and what joins them. A named constant is a name in capitals that a module or a class sets to something
with a number in it; fields of BrainSettings and Kernel count, too. Of the lines, all of which count against the aim,
`policy_code_lines` are what is left without docstrings, comments and blank ones.
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
LIMITS = {"policy_modules": 12, "policy_lines": 3000, "policy_constants": 60}
"""What one person can hold in their head: the aim that was set for the redesign."""
REACHED = {"policy_modules": 17, "policy_lines": 4643, "policy_constants": 85}
"""What it is by now: a test lets it shrink only. What it would cost to come nearer is in docs/design/ablation.md."""


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


def code_lines(source: str) -> int:
    """Lines of one module that neither docstrings nor comments nor nothing at all fill."""
    texts = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    told = {line for text in texts for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    lines = (line.strip() for at, line in enumerate(source.splitlines(), start=1) if at not in told)
    return sum(1 for line in lines if line and not line.startswith("#"))


def sizes() -> dict[str, int]:
    """The figures by metric."""
    sources = [path.read_text() for path in modules()]
    return {
        "policy_modules": len(sources),
        "policy_lines": sum(len(source.splitlines()) for source in sources),
        "policy_code_lines": sum(map(code_lines, sources)),
        "policy_constants": sum(1 for source in sources for _ in constants(source)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    results = [
        Result(name, value, name.rpartition("_")[2], f"<= {LIMITS[name]}" if name in LIMITS else "")
        for name, value in sizes().items()
    ]
    report("policy_size", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
