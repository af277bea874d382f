"""Adds fabrics to the user's folder, and removes them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from ....agent.nccl import fabric
from ....agent.nccl.mock_cuda.machine import MAX_FILE_BYTES, read_machine
from ....agent.nccl.twin.machines import MACHINES
from ....agent.nccl.twin.twin import Cluster
from ....store.atomic_file import atomic_write
from ....store.errors import UserError
from ....store.foreign.regular_file import read_file
from ....store.paths import user_fabrics_dir
from .belief import ReleaseBelief, ask
from .text import fabric_text

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Added(msgspec.Struct, frozen=True):
    """A fabric that was added."""

    fabric: str
    file: str
    nccl: str
    n_nodes: int
    ranks_per_node: int
    worst_relative_error: float
    """Largest relative error of the fabric's belief against NCCL's estimates."""


def check_name(name: str, *, force: bool) -> None:
    """Refuse a name that is invalid or taken, with a UserError; `force` allows that of a fabric of the user."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be the name of a fabric", "use 1 to 64 letters, digits, - and _")
    if name in fabric.names() or name in MACHINES:
        raise UserError(
            f"zerotune itself has a {'fabric' if name in fabric.names() else 'machine'} {name}", "choose another name"
        )
    if name in fabric.user_names() and not force:
        raise UserError(f"there is a fabric {name} already", "choose another name, or replace it with --force")


def add(
    name: str, topology: Path, *, n_nodes: int, ranks_per_node: int | None, library: Path, force: bool = False
) -> Added:
    """Make a fabric from a topology file and the belief of a libnccl.so.2 about it, in the user's folder.

    Without `ranks_per_node`, all GPUs of a node are used.

    Raises:
        UserError: the name, the file or the numbers cannot be used, or the folder cannot be written.
        PluginError: the library failed.
    """
    check_name(name, force=force)
    machine = read_machine(topology)
    if n_nodes > 1 and not machine.nics:
        raise UserError(f"{topology} has no network adapter, so {n_nodes} nodes cannot be connected", "use --nodes 1")
    used = ranks_per_node or len(machine.gpus)
    if n_nodes * used == 1:
        raise UserError(f"one GPU of {topology} on one node has nobody to talk to", "ask for more with --nodes")
    content = read_file(topology, MAX_FILE_BYTES)
    with tempfile.TemporaryDirectory(prefix="zerotune-") as folder:
        copy = Path(folder) / topology.name
        copy.write_bytes(content)
        # All nodes first: more ranks than can be asked about are refused at once.
        many_nodes = ask(library, Cluster(copy, n_nodes, used)) if n_nodes > 1 else None
        one_node = ask(library, Cluster(copy, 1, used)) if used > 1 else None
    found: list[ReleaseBelief] = [each for each in (one_node, many_nodes) if each is not None]
    text = fabric_text(
        name,
        found[0].release,
        machine.gpus[0],
        one_node.topology if one_node else None,
        many_nodes.topology if many_nodes else None,
    )
    path = user_fabrics_dir() / f"{name}.toml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for kept, its in ((path.with_suffix(".xml"), content), (path, text.encode())):
            with atomic_write(kept) as partial:
                partial.write_bytes(its)
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}", "look at its permissions") from error
    fabric.load(name)
    worst = max(each.worst.relative_error for each in found)
    return Added(name, str(path), found[0].release, n_nodes, used, worst)


def remove(name: str) -> None:
    """Remove a fabric of the user; UserError if there is none of this name."""
    if name in fabric.names():
        raise UserError(f"{name} is a fabric that zerotune ships", "only those that were added can be removed")
    if name not in fabric.user_names():
        known = ", ".join(fabric.user_names()) or "none"
        raise UserError(f"no fabric {name!r} was added", f"there are: {known}")
    for suffix in (".toml", ".xml"):
        (user_fabrics_dir() / f"{name}{suffix}").unlink(missing_ok=True)
