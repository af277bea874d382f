"""The import table of docs/architecture.md, checked on the sources; and what must stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("agent", "store", "tuner", "zero_runtime")
BASE = {
    "zerotune.store.records",
    "zerotune.store.errors",
    "zerotune.store.wire",
    "zerotune.store.paths",
    "zerotune.store.plan_file",
    "zerotune.store.atomic_file",
}

# Longest matching prefix rules: module prefix -> prefixes of ours it may import.
ALLOWED = {
    "store": {"store"},
    "zerotune.store.records": BASE,
    "zerotune.store.errors": BASE,
    "zerotune.store.wire": BASE,
    "zerotune.store.paths": set(),
    "zerotune.store.endpoints": BASE,
    "zerotune.store.atomic_file": set(),
    "zerotune.store.plan_file": BASE,
    "zero_runtime": {"zero_runtime"},
    "zerotune.agent.nccl": {"zerotune.agent.nccl", *BASE},
    "agent": {"agent", "zerotune.store.trace_format", "zerotune.store.endpoints", *BASE},
    "tuner": {
        "tuner",
        "store",
        "zerotune.agent.nccl",
        "zerotune.agent.launch",
        "zerotune.agent.settings",
        "zerotune.agent.daemon_link.keys",
    },
    "zerotune.tuner.offline.memory_report": {"store", "zerotune.zero_runtime.analysis"},
    # Runs inside a training process of its own making, like a user's script.
    "zerotune.tuner.offline.sweep.worker": {"tuner", "store", "agent"},
}
THIRD_PARTY_BANNED = {
    "store": {"torch", "zmq", "sklearn", "scipy"},
    "agent": {"sklearn", "sqlite_utils", "scipy", "skops", "pandas"},
    "zerotune.agent.launch": {"torch"},
    "zero_runtime": {"zmq", "msgspec", "sqlite_utils", "sklearn", "numpy"},
    "tuner": {"torch"},
}
TORCH_ALLOWED_IN_TUNER = {"zerotune.tuner.offline.sweep.worker"}


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
    loaded = loaded_after("import zerotune.agent.session, zerotune.agent.activate")
    assert not loaded & {"sklearn", "sqlite3", "sqlite_utils", "zero_runtime", "tuner", "matplotlib"}


def test_command_line_loads_no_torch():
    loaded = loaded_after("import zerotune.tuner.cli, zerotune.agent.launch")
    assert not loaded & {"torch", "sklearn", "sqlite_utils", "matplotlib"}


def test_no_test_imports_a_conftest():
    """There are several of that name, and pytest keeps the one that it has loaded last."""
    wrong = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if any(within(n, ["conftest"]) for n in imports_of(path, lazy=True))
    ]
    assert wrong == []
