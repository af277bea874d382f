"""Public functions with three or more parameters say what each of them is, what comes back and what is raised.

ruff holds the form of the sections that exist; that they exist is held here.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("agent", "store", "zero_runtime", "tuner", "benchmarks")
N_PARAMETERS = 3
"""From how many parameters on, `self` and `cls` of a method apart."""
FOREIGN = {"Module": torch.nn.Module, "ProcessGroup": torch.distributed.ProcessGroup}
"""Classes of others that document what ours override, by name."""
SECTION = re.compile(r"^(Args|Returns|Yields|Raises):$", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A function in its file, and the class it is a method of."""

    path: Path
    function: Function
    class_: ast.ClassDef | None

    def __str__(self) -> str:
        name = f"{self.class_.name}.{self.function.name}" if self.class_ else self.function.name
        return f"{self.path.relative_to(ROOT)}:{self.function.lineno}: {name}"

    @property
    def parameters(self) -> list[str]:
        args = self.function.args
        positional = [*args.posonlyargs, *args.args]
        if self.class_ and not _decorated(self.function, "staticmethod"):
            positional = positional[1:]
        stars = [star for star in (args.vararg, args.kwarg) if star]
        return [arg.arg for arg in (*positional, *args.kwonlyargs, *stars) if not arg.arg.startswith("_")]

    @cached_property
    def sections(self) -> dict[str, str]:
        """Text of each section by its name."""
        parts = SECTION.split(ast.get_docstring(self.function) or "")
        return dict(zip(parts[1::2], parts[2::2], strict=True))


def _decorated(function: Function, name: str) -> bool:
    return any(ast.unparse(decorator).split("(")[0].split(".")[-1] == name for decorator in function.decorator_list)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """What the function's body runs by itself, without the functions and classes defined in it."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)


def _is_private(path: Path) -> bool:
    return any(part.startswith("_") for part in path.relative_to(ROOT).with_suffix("").parts if "__" not in part)


class Product:
    """All modules of the product, parsed once."""

    def __init__(self) -> None:
        names = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        paths = [ROOT / name for name in names if name.endswith(".py") and (ROOT / name).exists()]
        self.modules = {path: ast.parse(path.read_text()) for path in paths}
        self.classes = {
            node.name: node
            for tree in self.modules.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    def ancestors(self, class_: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """Classes of ours that it descends from."""
        for base in class_.bases:
            parent = self.classes.get(ast.unparse(base).split("[")[0].split(".")[-1])
            if parent and parent is not class_:
                yield parent
                yield from self.ancestors(parent)

    def errors(self) -> set[str]:
        """Names of our own exceptions."""
        roots = {name for name, value in vars(builtins).items() if _is_exception(value)}
        return {
            class_.name
            for class_ in self.classes.values()
            if any(ast.unparse(base) in roots for one in (class_, *self.ancestors(class_)) for base in one.bases)
        }

    def commands(self) -> set[str]:
        """Functions that typer makes commands of: those registered in a loop, besides the decorated ones."""
        app = self.modules[ROOT / "tuner" / "cli" / "app.py"]
        loops = [node for node in app.body if isinstance(node, ast.For) and "command" in ast.unparse(node)]
        return {node.id for loop in loops for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}

    def functions(self) -> Iterator[Place]:
        """Public functions and methods that must document their parameters."""
        commands = self.commands()
        for path, tree in self.modules.items():
            if _is_private(path):
                continue
            for function, class_ in _public(tree, None):
                place = Place(path, function, class_)
                is_command = _decorated(function, "command") or (
                    path.is_relative_to(ROOT / "tuner" / "cli") and function.name in commands
                )
                if len(place.parameters) < N_PARAMETERS or is_command or _decorated(function, "overload"):
                    continue
                if class_ is None or not self._base_documents(class_, function.name):
                    yield place

    def _base_documents(self, class_: ast.ClassDef, name: str) -> bool:
        ours = [class_, *self.ancestors(class_)]
        theirs = [FOREIGN.get(ast.unparse(base).split(".")[-1].strip("_")) for one in ours for base in one.bases]
        return any(hasattr(base, name) for base in theirs if base) or any(
            isinstance(node, Function) and node.name == name for base in ours[1:] for node in base.body
        )


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _public(tree: ast.AST, class_: ast.ClassDef | None) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node, node)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node, class_


@pytest.fixture(scope="module")
def product() -> Product:
    return Product()


def _faults(place: Place, errors: set[str]) -> Iterator[str]:
    nodes = [*_own_nodes(place.function)]
    described = set(re.findall(r"^    \*{0,2}(\w+):", place.sections.get("Args", ""), re.MULTILINE))
    missing = [name for name in place.parameters if name not in described]
    if missing:
        yield f"Args: without {', '.join(missing)}"
    returns = place.function.returns
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
        expected = "Yields"
    elif returns is None or ast.unparse(returns) in ("None", "NoReturn", "Never"):
        expected = None
    else:
        expected = "Returns"
    if expected and expected not in place.sections:
        yield f"no {expected}:"
    raised = {_name_of(node.exc) for node in nodes if isinstance(node, ast.Raise) and node.exc} & errors
    unnamed = sorted(name for name in raised if name not in place.sections.get("Raises", ""))
    if unnamed:
        yield f"Raises: without {', '.join(unnamed)}"


def _name_of(raised: ast.expr) -> str:
    return ast.unparse(raised.func if isinstance(raised, ast.Call) else raised).split(".")[-1]


def test_functions_describe_their_parameters(product: Product):
    errors = product.errors()
    wrong = [f"{place}: {fault}" for place in product.functions() for fault in _faults(place, errors)]
    assert not wrong, "\n".join([f"{len(wrong)} faults:", *wrong])


def test_attributes_say_their_own_thing(product: Product):
    wrong = [
        f"{path.relative_to(ROOT)}:{doc.lineno}: {doc.value.value.splitlines()[0]}"
        for path, tree in product.modules.items()
        for doc in _attribute_docs(tree)
        if str(doc.value.value).startswith(("The same", "...", "…"))
    ]
    assert not wrong, "\n".join(wrong)


def _attribute_docs(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, after in pairwise(body):
            if (
                isinstance(before, (ast.Assign, ast.AnnAssign))
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                yield after
