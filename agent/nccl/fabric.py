"""Fabric files, which describe emulated machines.

The *belief* is the input of NCCL's cost model; the *truth* gives the real durations of collectives. A tuner can gain
from their difference. The rest describes compute, contention between compute and collectives, memory and noise. Files
are TOML and checked strictly: a FabricError names the wrong key and its value.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from ...store.errors import FabricError, UserError, reason
from ...store.foreign.regular_file import begin_of, read_file
from ...store.paths import user_fabrics_dir
from ...store.records import CommunicatorClass
from . import catalog
from .fabric_file import FabricFile, Truth
from .fabric_model import Fabric
from .truth import CurveKey, RecordedCurve, read_points
from .twin.machines import Node, node

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FABRICS_DIR: Final = Path(__file__).parent / "fabrics"
MAX_FILE_BYTES: Final = 256 << 10
"""Limit of a fabric file; shipped files have a few KiB."""
MAX_LINE_DOTS: Final = 1000
"""Limits tomllib's time, which grows with the square of the number of parts of a key."""
MAX_POINTS_BYTES: Final = 16 << 20
"""Limit of a table of measured points."""


def names() -> tuple[str, ...]:
    """Names of the shipped fabrics."""
    return tuple(sorted(path.stem for path in FABRICS_DIR.glob("*.toml")))


def user_names() -> tuple[str, ...]:
    """Names of the fabrics that this user has added, without names of shipped fabrics."""
    try:
        folder = user_fabrics_dir()
    except UserError:  # the user has no home directory
        return ()
    return tuple(sorted({path.stem for path in folder.glob("*.toml")} - {*names()}))


def load(name_or_path: str | Path) -> Fabric:
    """A fabric by name, shipped or added by the user, or any fabric file by path; FabricError if it cannot be used."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        known = dict.fromkeys(names(), FABRICS_DIR) | {name: user_fabrics_dir() for name in user_names()}
        if str(name_or_path) not in known:
            raise FabricError(
                f"there is no fabric {str(name_or_path)!r}",
                f"use one of {', '.join(known)} or a .toml file",
            )
        path = known[str(name_or_path)] / f"{name_or_path}.toml"
    try:
        stamp = path.stat().st_mtime_ns
    except (OSError, ValueError) as error:  # ValueError: the name has a null byte
        raise FabricError(f"fabric file {str(path)!r} cannot be read: {reason(error)}", "check the path") from None
    return _load(path.resolve(), stamp)


@lru_cache(maxsize=64)
def _load(path: Path, _stamp: int) -> Fabric:
    try:
        text = _begin(path)
        if len(text) > MAX_FILE_BYTES or any(line.count(b".") > MAX_LINE_DOTS for line in text.split(b"\n")):
            most = f"{MAX_FILE_BYTES >> 10} KiB, {MAX_LINE_DOTS} dots in a line"
            raise FabricError(f"fabric file {path} is larger than any machine's ({most})", "name another file")
        raw = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise FabricError(f"fabric file {path} cannot be read: {error.strerror}", "check the path") from None
    except RecursionError:
        raise FabricError(f"fabric file {path} is nested too deeply", "name another file") from None
    except ValueError as error:  # also raised for a number of thousands of digits
        raise FabricError(f"fabric file {path} is not TOML: {error}", "correct the line named") from None
    _refuse_infinities(path, raw)
    try:
        file = msgspec.convert(raw, FabricFile)
    except msgspec.ValidationError as error:
        raise _explain(path, raw, str(error)) from None
    fabric = Fabric(path.stem, file, _points(path, file.truth), _node(path, file))
    _check(path, fabric)
    return fabric


def _begin(path: Path) -> bytes:
    return begin_of(path, MAX_FILE_BYTES + 1)


def _refuse_infinities(path: Path, value: object, key: str = "") -> None:
    """Raise FabricError for `inf` and `nan`, which TOML allows."""
    if isinstance(value, float) and not math.isfinite(value):
        raise FabricError(f"fabric file {path}: {key.lstrip('.')} = {value!r} is not finite", "give a number")
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_infinities(path, inner, f"{key}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_infinities(path, inner, f"{key}[{index}]")


def _points(path: Path, truth: Truth) -> Mapping[CurveKey, RecordedCurve]:
    if not truth.recorded:
        return {}
    points = path.parent / truth.recorded
    try:
        text = read_file(points, MAX_POINTS_BYTES).decode()
        curves = read_points(io.StringIO(text, newline=""))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise FabricError(
            f"fabric file {path}: truth.recorded = {truth.recorded!r} cannot be used: {error}",
            "give a CSV of measured points beside the fabric file",
        ) from None
    return curves


def _node(path: Path, file: FabricFile) -> Node | None:
    """The machine that the file names for each of its nodes."""
    if file.machine is None:
        return None
    try:
        found = node(file.machine, path.parent)
    except UserError as error:
        raise FabricError(f"fabric file {path}: machine = {file.machine!r}: {error.problem}", error.remedy) from None
    if found.n_gpus < file.ranks_per_node:
        problem = f"machine = {file.machine!r} has {found.n_gpus} GPUs, and ranks_per_node is {file.ranks_per_node}"
        raise FabricError(f"fabric file {path}: {problem}", "name a larger one")
    return found


def _explain(path: Path, raw: Mapping[str, Any], message: str) -> FabricError:
    """The error of msgspec as one that names key, value and remedy."""
    problem, _, where = message.partition(" - at `$")
    key = where.removesuffix("`").lstrip(".")
    value: Any = raw
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key):
        try:
            value = value[int(index)] if index else value[name]
        except (KeyError, IndexError, TypeError):
            value = None
    shown = f"{key} = {value!r}: " if key and not isinstance(value, dict) else f"{key}: " if key else ""
    return FabricError(f"fabric file {path}: {shown}{problem}", "correct that key (see docs/reference/formats.md)")


def _check(path: Path, fabric: Fabric) -> None:
    """Raise FabricError for impossible machines: missing spans, more bandwidth than the links, missing cells."""

    def refuse(key: str, value: object, problem: str, remedy: str) -> FabricError:
        return FabricError(f"fabric file {path}: {key} = {value!r} {problem}", remedy)

    truth, belief = fabric.truth, fabric.belief
    if fabric.ranks_per_node > 1 and belief.one_node is None:
        raise refuse("ranks_per_node", fabric.ranks_per_node, "needs belief.one_node", "add that table")
    if fabric.max_nodes > 1 and belief.many_nodes is None:
        raise refuse("max_nodes", fabric.max_nodes, "needs belief.many_nodes", "add that table")
    if fabric.max_nodes > 1 and truth.inter_gbs <= 0:
        raise refuse("truth.inter_gbs", truth.inter_gbs, "is not a rate", "give the node's network rate")
    for index, cell in enumerate(truth.cells):
        key = f"truth.cells[{index}]"
        channels = [n_channels for n_channels, _ in cell.channel_factors]
        if channels != sorted(set(channels)):
            raise refuse(f"{key}.channel_factors", channels, "does not rise", "order it by channel count")
        for span in cell.spans:
            link_gbs = truth.intra_gbs if span == "one_node" else truth.inter_gbs
            fastest_gbs = max(cell.gbs(n_channels) for n_channels in range(1, 65))
            if fastest_gbs > link_gbs:
                raise refuse(
                    f"{key}.limit_gbs",
                    cell.limit_gbs,
                    f"moves {fastest_gbs:.4g} GB/s over {span} links of {link_gbs:.4g} GB/s",
                    "lower limit_gbs or channel_factors",
                )
    for communicator in _probe_classes(fabric):
        for collective in (*catalog.TUNABLE, *catalog.RING_ONLY):
            for algorithm, protocol in fabric.cells(communicator, collective):
                try:
                    fabric.truth_us(communicator, collective, algorithm, protocol, 1, 1 << 20)
                except FabricError as error:
                    raise FabricError(f"fabric file {path}: {error.problem}", error.remedy) from None


def _probe_classes(fabric: Fabric) -> list[CommunicatorClass]:
    """Small communicators of every kind that the fabric has."""
    probes = []
    if fabric.ranks_per_node > 1:
        probes.append(CommunicatorClass(2, 1))
    if fabric.max_nodes > 1:
        probes += [CommunicatorClass(2, 2), CommunicatorClass(fabric.max_ranks, fabric.max_nodes)]
    return probes


