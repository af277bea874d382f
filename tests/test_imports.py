"""The import table of docs/architecture.md, checked on the sources; and what must stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("agent", "store", "tuner", "zero_runtime")
BASE = {"store.records", "store.errors", "store.wire", "store.paths", "store.plan_file", "store.whole_file"}

# Longest matching prefix rules: module prefix -> prefixes of ours it may import.
ALLOWED = {
    "store": {"store"},
    "store.records": BASE,
    "store.errors": BASE,
    "store.wire": BASE,
    "store.paths": set(),
    "store.endpoints": BASE,
    "store.whole_file": set(),
    "store.plan_file": BASE,
    "zero_runtime": {"zero_runtime"},
    "agent.nccl": {"agent.nccl", *BASE},
    "agent": {"agent", "store.trace_format", "store.endpoints", *BASE},
    "tuner": {"tuner", "store", "agent.nccl", "agent.launch", "agent.settings", "agent.keys"},
    "tuner.memory_report": {"store", "zero_runtime.analysis"},
    # Runs inside a training process of its own making, like a user's script.
    "tuner.sweep_worker": {"tuner", "store", "agent"},
}
THIRD_PARTY_BANNED = {
    "store": {"torch", "zmq", "sklearn", "scipy"},
    "agent": {"sklearn", "sqlite_utils", "scipy", "skops", "pandas"},
    "agent.launch": {"torch"},
    "zero_runtime": {"zmq", "msgspec", "sqlite_utils", "sklearn", "numpy"},
    "tuner": {"torch"},
}
TORCH_ALLOWED_IN_TUNER = {"tuner.sweep_worker"}


def modules():
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "site" in path.parts:
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(path, *, lazy):
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazy else _top_level(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _top_level(tree):
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, (ast.If, ast.Try)):
            pending += [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                pending += [child for handler in node.handlers for child in handler.body]
        yield node


def within(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def rule(table, module):
    fitting = [prefix for prefix in table if within(module, [prefix])]
    return table[max(fitting, key=len)] if fitting else set()


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in modules()])
def test_imports_go_one_way(module, path):
    for name in imports_of(path, lazy=True):
        if name.split(".")[0] in OURS:
            assert within(name, rule(ALLOWED, module)), f"{module} imports {name}"


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in modules()])
def test_third_party_stays_where_it_belongs(module, path):
    banned = set().union(*(names for prefix, names in THIRD_PARTY_BANNED.items() if within(module, [prefix])))
    if module in TORCH_ALLOWED_IN_TUNER:
        banned -= {"torch"}
    for name in imports_of(path, lazy=not module.startswith("tuner")):
        assert name.split(".")[0] not in banned, f"{module} imports {name}"


def loaded_after(statement):
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_agent_is_light():
    loaded = loaded_after("import agent.session, agent.activate")
    assert not loaded & {"sklearn", "sqlite3", "sqlite_utils", "zero_runtime", "tuner", "matplotlib"}


def test_command_line_loads_no_torch():
    loaded = loaded_after("import tuner.cli, agent.launch")
    assert not loaded & {"torch", "sklearn", "sqlite_utils", "matplotlib"}


def test_no_test_imports_a_conftest():
    """There are several of that name, and pytest keeps the one that it has loaded last."""
    wrong = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if any(within(n, ["conftest"]) for n in imports_of(path, lazy=True))
    ]
    assert wrong == []
