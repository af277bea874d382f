"""The rooms of the code, read off its imports.

`python docs/rooms.py` renews docs/pictures/rooms.svg and the table in docs/architecture.md. tests/test_imports.py holds
both to the imports, and the imports to `ALLOWED`.

A room is a folder of the second level (`tuner/learning`, with all below it); modules that lie directly in a package are
its front where they import rooms of the package, and its base where they do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("store", "agent", "zero_runtime", "tuner")
PICTURE: Final = ROOT / "docs" / "pictures" / "rooms.svg"
PAGE: Final = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: made by docs/rooms.py -->", "<!-- end of rooms -->"
DEEPER: Final = ("agent/nccl/emulated",)
"""Rooms within rooms that are told apart."""
WITHIN: Final = {"store/foreign": "store", "store/records": "store"}
"""Folders that are no rooms of their own."""
NO_ROOM: Final = ("agent/site", "zero_runtime/examples")
"""A file that Python runs by itself, and scripts."""

CONTRACTS: Final = {"store"}
RECORDED: Final = {"store", "store/sqlite"}
ALLOWED: Final[dict[str, tuple[str, set[str]]]] = {
    "store": ("what all share: records, errors, wire format, paths", set()),
    "store/sqlite": ("records at rest: SQLite, one writer; `rows`, `damage`, `writing` and `reading`", CONTRACTS),
    "agent base": ("`launch`, settings, the job's c10d store", CONTRACTS | {"agent/nccl", "agent/machine"}),
    "agent/nccl": ("what NCCL is, as far as we touch it: catalog, cost model, plugin", CONTRACTS),
    "agent/machine": ("this rank's place on its node; the hardware's identity", CONTRACTS | {"agent/nccl"}),
    "agent/nccl/emulated": ("an NCCL for machines without GPUs", CONTRACTS | {"agent/nccl"}),
    "agent/agreement": (
        "all ranks of a communicator adopt the same plan at the same call",
        CONTRACTS | {"agent/nccl", "agent base"},
    ),
    "agent/daemon_link": ("the line to the daemon", CONTRACTS | {"agent base"}),
    "agent/steps": (
        "where steps begin and end",
        CONTRACTS | {"agent base", "agent/daemon_link", "agent/nccl", "agent/nccl/emulated"},
    ),
    "agent/observing": (
        "the plugin's rings, device memory, trace files",
        CONTRACTS | {"agent/daemon_link", "agent/nccl", "agent/nccl/emulated", "agent/steps"},
    ),
    "agent": (
        "activation, and the session that puts the rooms together",
        CONTRACTS
        | {"agent base", "agent/agreement", "agent/daemon_link", "agent/machine", "agent/nccl", "agent/nccl/emulated"}
        | {"agent/observing", "agent/steps"},
    ),
    "agent/callbacks": (
        "the job's figures, for trainers and experiment trackers",
        CONTRACTS | {"agent", "agent/daemon_link", "agent/steps"},
    ),
    "zero_runtime base": ("errors, checks, settings, phases, collectives, loss scaling", set()),
    "zero_runtime/layout": ("where parameters lie in flat buffers", {"zero_runtime base"}),
    "zero_runtime/stages": ("stages 1 to 3 at work", {"zero_runtime base", "zero_runtime/layout"}),
    "zero_runtime/optimizer": (
        "torch's optimizers on shards",
        {"zero_runtime base", "zero_runtime/layout", "zero_runtime/stages"},
    ),
    "zero_runtime/autotune": (
        "bucket, prefetch depth and communicator, changed while training runs",
        {"zero_runtime base", "zero_runtime/stages"},
    ),
    "zero_runtime": (
        "`shard`, checkpoints",
        {
            "zero_runtime base",
            "zero_runtime/autotune",
            "zero_runtime/layout",
            "zero_runtime/stages",
            "zero_runtime/optimizer",
        },
    ),
    "tuner base": (
        "the join of one collective over its ranks; what follows from decisions; scratch folders",
        RECORDED | {"agent/machine"},
    ),
    "tuner/late_ranks": ("which ranks collectives wait for", CONTRACTS),
    "tuner/client": ("speaks to a daemon from outside a job", CONTRACTS | {"agent/daemon_link"}),
    "tuner/traces": ("reads other tools' traces and ours", RECORDED | {"agent/nccl", "tuner base"}),
    "tuner/modeling": ("what settings cost before they are tried", RECORDED | {"agent/nccl"}),
    "tuner/advice": (
        "which ZeRO configuration on which cluster, before anything runs",
        CONTRACTS | {"agent/nccl"},
    ),
    "tuner/fingerprint": ("recognises training from its collectives", CONTRACTS),
    "tuner/learning": (
        "decides: policy, regimes, knowledge",
        RECORDED | {"agent/nccl", "tuner/modeling", "tuner/fingerprint"},
    ),
    "tuner/fleet": (
        "what nodes learned, shared as files: objects, books",
        RECORDED | {"agent/nccl", "tuner base", "tuner/modeling"},
    ),
    "tuner/service": (
        "the daemon",
        RECORDED
        | {"agent/daemon_link", "tuner base", "tuner/fingerprint", "tuner/fleet", "tuner/late_ranks"}
        | {"tuner/learning", "tuner/modeling"},
    ),
    "tuner/all_users": ("root's service: a daemon for each user of the node", CONTRACTS),
    "tuner/inductor": (
        "what torch inductor is told of collectives' durations",
        RECORDED | {"agent base", "agent/machine", "tuner base", "tuner/modeling"},
    ),
    "tuner/metrics": ("Prometheus", RECORDED | {"tuner/client"}),
    "tuner/offline": (
        "sweep, replay, report, import, export",
        RECORDED
        | {"agent/nccl", "tuner base", "tuner/client", "tuner/fingerprint", "tuner/learning"}
        | {"tuner/modeling", "tuner/traces", "tuner/advice", "tuner/late_ranks"},
    ),
    "tuner/watching": (
        "jobs as they run, in a browser or a terminal",
        RECORDED | {"tuner base", "tuner/client", "tuner/modeling", "tuner/offline"},
    ),
    "tuner/demo": (
        "the whole loop on this machine",
        RECORDED | {"agent base", "agent/nccl", "tuner base", "tuner/client", "tuner/modeling", "tuner/offline"},
    ),
    "tuner/environment": (
        "which of NCCL's variables the next start of a job tries, by the starts before it",
        RECORDED | {"agent/machine", "tuner base", "tuner/modeling", "tuner/offline"},
    ),
    "tuner/doctor": (
        "what on this machine would stop tuning",
        RECORDED | {"agent base", "agent/daemon_link", "agent/machine", "agent/nccl", "tuner/client"},
    ),
    "tuner/cli": (
        "the `zerotune` command",
        RECORDED
        | {"agent base", "agent/nccl", "agent/daemon_link", "tuner/client", "tuner/demo", "tuner/doctor"}
        | {
            "tuner/all_users",
            "tuner/advice",
            "tuner/environment",
            "tuner/fingerprint",
            "tuner/fleet",
            "tuner/learning",
            "tuner/metrics",
            "tuner/modeling",
            "tuner/offline",
            "tuner/service",
            "tuner/traces",
            "tuner/watching",
        },
    ),
}
"""Room: its purpose, and the rooms it may import."""
EXCEPTIONS: Final = {
    # Runs inside a training process of its own making, like a user's script.
    "tuner/offline/sweep/worker.py": {"agent", "agent base", "agent/machine", "agent/nccl/emulated"},
}


def files() -> list[str]:
    """Every module of ours, as its path from the root."""
    found = (path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [str(path) for path in found if not str(path).startswith(NO_ROOM)]


@cache
def names_imported(file: str, *, lazy: bool = True) -> tuple[str, ...]:
    """Full names that a file imports; `lazy` counts those in functions and for types alone, too."""
    names = []
    for node in _statements(ast.parse((ROOT / file).read_text()).body, lazy=lazy):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{source(node, file)}.{alias.name}" for alias in node.names]
    return tuple(names)


def _statements(body: Iterable[ast.AST], *, lazy: bool) -> Iterator[ast.AST]:
    """All statements, without a look into their expressions, where no import can be."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and not lazy and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if lazy or isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            for field in ("body", "orelse", "handlers", "finalbody", "cases"):
                yield from _statements(getattr(node, field, ()), lazy=lazy)


@cache
def imports(file: str) -> frozenset[str]:
    """Files of ours that this one imports, wherever in it, for types alone too."""
    known = _modules()
    found = set()
    for name in set(names_imported(file)):
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name:
            found.add(known[name])
    return frozenset(found - {file})


def source(node: ast.ImportFrom, file: str) -> str:
    """The full name of the module that `from ... import` in a file of ours names, relative or not."""
    if node.level == 0:
        return node.module or ""
    package = ("zerotune", *Path(file).parent.parts)
    return ".".join((*package[: len(package) - node.level + 1], *(node.module or "").split("."))).rstrip(".")


@cache
def _modules() -> dict[str, str]:
    known = {}
    for file in files():
        name = "zerotune." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        known[name] = file
    return known


def room_of_folder(file: str) -> str:
    """The room by folders alone: a package's front and base are one."""
    for deeper in DEEPER:
        if file.startswith(deeper + "/"):
            return deeper
    package, _, rest = file.partition("/")
    folder = f"{package}/{rest.partition('/')[0]}" if "/" in rest else package
    return WITHIN.get(folder, folder)


@cache
def room(file: str) -> str:
    """The room that a file belongs to."""
    package = room_of_folder(file)
    if "/" in package or package == "store":
        return package
    pending, seen = [file], {file}
    while pending:
        for one in imports(pending.pop()):
            if one.startswith(package + "/") and one not in seen:
                if room_of_folder(one) not in (package, "agent/nccl", "agent/machine"):
                    return package  # its front
                seen.add(one)
                pending.append(one)
    return f"{package} base"


def arrows() -> dict[str, set[str]]:
    """Room to the rooms that it imports."""
    found: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for file in files():
        found.setdefault(room(file), set()).update(
            room(one) for one in imports(file) if room(one) not in EXCEPTIONS.get(file, ())
        )
    return {name: rooms - {name} for name, rooms in found.items()}


def trespasses() -> Iterator[str]:
    """Every import that `ALLOWED` does not allow."""
    for file in files():
        may = ALLOWED[room(file)][1] | EXCEPTIONS.get(file, set()) | {room(file)}
        for one in sorted(imports(file)):
            if room(one) not in may:
                yield f"{file} ({room(file)}) imports {one} ({room(one)})"


def circles() -> list[set[str]]:
    """Modules that import each other in a circle, directly or through others."""
    reach: dict[str, set[str]] = {}
    for file in files():
        pending, seen = [file], set[str]()
        while pending:
            for one in imports(pending.pop()) - seen:
                seen.add(one)
                pending.append(one)
        reach[file] = seen
    return [{one, *(other for other in seen if one in reach[other])} for one, seen in reach.items() if one in seen]


def table() -> str:
    """The rooms as a Markdown table."""
    lines = ["| room | purpose | may import of ours |", "|---|---|---|"]
    for name, (purpose, may) in ALLOWED.items():
        lines.append(f"| `{name}` | {purpose} | {', '.join(f'`{one}`' for one in sorted(may)) or 'nothing'} |")
    return "\n".join(lines)


def _layers(graph: dict[str, set[str]]) -> dict[str, int]:
    depth: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((of(one) for one in graph[name]), default=-1)
        return depth[name]

    for name in graph:
        of(name)
    return depth


def _without_shortcuts(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Only the arrows that no path of others replaces."""

    def reached(name: str) -> set[str]:
        found = set(graph[name])
        for one in graph[name]:
            found |= reached(one)
        return found

    return {
        name: {one for one in rooms if not any(one in reached(other) for other in rooms - {one})}
        for name, rooms in graph.items()
    }


WIDTH, HEIGHT, GAP_X, GAP_Y = 168, 34, 22, 46
COLOURS: Final = {"store": "#e8d9b5", "agent": "#cfe3d4", "zero_runtime": "#e6d3e3", "tuner": "#cfdcee"}


def picture() -> str:
    """The rooms and their imports as SVG: what imports stands above what it imports."""
    graph = arrows()
    depth = _layers(graph)
    layers = [[name for name in ALLOWED if depth[name] == at] for at in range(max(depth.values()) + 1)][::-1]
    widest = max(map(len, layers))
    full = widest * (WIDTH + GAP_X)
    place = {}
    for row, layer in enumerate(layers):
        start = (full - len(layer) * (WIDTH + GAP_X)) / 2
        for column, name in enumerate(layer):
            place[name] = (start + column * (WIDTH + GAP_X) + GAP_X / 2, 10 + row * (HEIGHT + GAP_Y))
    height = 20 + len(layers) * (HEIGHT + GAP_Y)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full:.0f} {height}" font-family="sans-serif">',
        "<title>The rooms of the code and what they import</title>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{full:.0f}" height="{height}" fill="#fff"/>',
    ]
    for name, rooms in _without_shortcuts(graph).items():
        for one in sorted(rooms):
            (x, y), (to_x, to_y) = place[name], place[one]
            x, to_x, y = x + WIDTH / 2, to_x + WIDTH / 2, y + HEIGHT
            lines.append(
                f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {y + 26:.0f} {to_x:.0f} {to_y - 26:.0f} {to_x:.0f} {to_y - 1:.0f}" '
                'fill="none" stroke="#667" stroke-width="1.2" opacity="0.75" marker-end="url(#a)"/>'
            )
    for name, (x, y) in place.items():
        colour = COLOURS[name.partition("/")[0].removesuffix(" base")]
        lines += [
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{colour}" stroke="#556"/>',
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 22:.0f}" text-anchor="middle" font-size="14">{name}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def page() -> str:
    """docs/architecture.md with the table as it should be."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PICTURE.write_text(picture())
    PAGE.write_text(page())
