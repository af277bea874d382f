"""How large the policy is: its modules, lines and named constants.

python -m benchmarks policy_size [--json]

It counts everything below tuner/learning except `explaining`. A named constant is a name in capitals of a module or
class whose value has a number in it; fields of BrainSettings and Kernel count, too. All lines count against the aim;
`policy_code_lines` are without docstrings, comments and blank lines.
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
"""The aim of the redesign: one person can hold so much in their head."""
REACHED = {"policy_modules": 17, "policy_lines": 4643, "policy_constants": 85}
"""The present sizes: a test lets them shrink only. docs/design/ablation.md has the price of coming nearer."""


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
    """Lines of one module without docstrings, comments and blank lines."""
    texts = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    told = {line for text in texts for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    lines = (line.strip() for at, line in enumerate(source.splitlines(), start=1) if at not in told)
    return sum(1 for line in lines if line and not line.startswith("#"))


def sizes() -> dict[str, int]:
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
