"""Tests assert what is behaviour: values, names, codes, exit codes; not our sentences, nor what is private."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
SENTENCE = re.compile(r"(?<![\w./-])[a-z]+(?:[,;:]? [a-z]+){2,}(?![\w./-])")
"""Three or more lower-case words in a row."""
PRIVATE = re.compile(r"(?:^|\.)_[a-zA-Z]\w*$")
OF_NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}
OF_OTHERS = {
    "_exit", "_getframe", "_dynamo", "_C", "_cdata", "_coalescing_manager", "_distributed_c10d", "_DistTestBase",
}  # fmt: skip
"""Names of Python's and torch's."""


def sentences(tree):
    """Literals with a sentence in what is asserted, also where they come from `parametrize`."""
    for function in [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]:
        given = parameters(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                asserted = node.test
            elif isinstance(node, ast.keyword) and node.arg == "match":
                asserted = node.value
            else:
                continue
            for one in ast.walk(asserted):
                literals = [one] if isinstance(one, ast.Constant) else given.get(getattr(one, "id", ""), [])
                yield from (
                    literal for literal in literals if isinstance(literal.value, str) and SENTENCE.search(literal.value)
                )


def parameters(function):
    """Literals that each parameter may be, by the function's `parametrize` decorators; and names of its loops."""
    given = {}
    for loop in ast.walk(function):
        if isinstance(loop, ast.For) and isinstance(loop.iter, (ast.Tuple, ast.List)):
            for name in ast.walk(loop.target):
                if isinstance(name, ast.Name):
                    given[name.id] = [one for one in ast.walk(loop.iter) if isinstance(one, ast.Constant)]
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("parametrize") and len(call.args) > 1:
            names = ast.literal_eval(call.args[0])
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            for row in getattr(call.args[1], "elts", []):
                row = ast.Tuple(row.args) if isinstance(row, ast.Call) else row
                values = [row] if len(names) == 1 else getattr(row, "elts", [])
                for name, value in zip(names, values, strict=False):
                    given.setdefault(name, []).extend(one for one in ast.walk(value) if isinstance(one, ast.Constant))
    return given


def private_names(tree):
    """Uses of names with an underscore that belong to what is tested."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.search(node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if not is_own and node.attr not in OF_NAMEDTUPLE | OF_OTHERS:
                yield node
        elif isinstance(node, ast.ImportFrom):
            yield from (node for alias in node.names if PRIVATE.search(alias.name) and alias.name not in OF_OTHERS)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"getattr", "setattr"}:
            yield from (
                one
                for one in node.args[:2]
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and PRIVATE.search(one.value)
            )


def places(find):
    """Files and lines below tests/ where `find` finds something."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS)
        found += sorted({(str(name), node.lineno) for node in find(ast.parse(path.read_text()))})
    return [f"{name}:{line}" for name, line in found]


def test_no_sentence_is_asserted():
    assert places(sentences) == []


def test_nothing_private_is_used():
    assert places(private_names) == []


def test_modules_have_names_of_their_own():
    """Pytest imports them by these alone; the second of one name fails, whichever that is."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
