"""Random fabrics: shipped ones whose every number is off by a random factor, with bends of their own on top.

No policy was designed on them: a seed gives a belief and a truth that differ in ways nobody chose. On top of
the lines in the fabric file, each (collective, cell) gets a smooth random surface over size and channels, so
that truths have bends and second peaks that no formula has.
"""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tomllib

from zerotune.agent.nccl import fabric
from zerotune.store.records import Candidate

BELIEF_SIGMA = 0.15
TRUTH_SIGMA = 0.35
SURFACE_SIGMA = 0.08
_COUNTS = {"ring_channels", "tree_channels", "comm_channels", "nvls_channels", "type_inter", "type_intra"}
_KEPT = {"compute_capability", "cpu_is_amd", "plain_tree_pattern", "follows_belief"}


class Surface:
    """A smooth random factor by cell, log2 bytes and log2 channels; the same for the same seed."""

    def __init__(self, seed: int, sigma: float = SURFACE_SIGMA) -> None:
        self._seed = seed
        self._sigma = sigma
        self._waves: dict[tuple[int, int, int], np.ndarray] = {}

    def factor(self, collective: int, ran: Candidate, message_bytes: int) -> float:
        """What the time in the fabric's file is to be multiplied by.

        Args:
            collective: its number.
            ran: algorithm, protocol and channels that really run.
            message_bytes: NCCL's nBytes.

        Returns:
            About 1; its logarithm has a standard deviation of about `sigma`.
        """
        name = (collective, int(ran.algorithm or 0), int(ran.protocol or 0))
        if name not in self._waves:
            rng = np.random.default_rng([self._seed, *name])
            self._waves[name] = np.column_stack(
                [rng.normal(0, 0.35, 12), rng.normal(0, 0.9, 12), rng.uniform(0, 2 * math.pi, 12)]
            )
        by_bytes, by_channels, phase = self._waves[name].T
        place = by_bytes * math.log2(message_bytes) + by_channels * math.log2(max(1, ran.n_channels)) + phase
        return math.exp(self._sigma * float(np.cos(place).sum()) / math.sqrt(6.0))


def generate(seed: int, base: str) -> Path:
    """A file with a variation of the shipped fabric `base`, for `fabric.load`."""
    rng = np.random.default_rng(seed)
    raw = tomllib.loads((fabric.FABRICS_DIR / f"{base}.toml").read_text(encoding="utf-8"))
    raw["title"], raw["source"] = f"generated from {base}, seed {seed}", "random"
    raw["belief"] = _shaken(raw["belief"], BELIEF_SIGMA, rng)
    raw["truth"] = _shaken({**raw["truth"], "follows_belief": False}, TRUTH_SIGMA, rng)
    for rate in ("intra_gbs", "inter_gbs"):  # links fast enough for whatever the cells came out as
        raw["truth"][rate] = 20.0 * raw["truth"].get(rate, 0.0)
    raw["noise"]["sigma"] = float(rng.uniform(0.015, 0.05))
    folder = Path(tempfile.mkdtemp(prefix="zerotune-generated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"generated_{seed}_{base}.toml"
    path.write_text(_toml(raw), encoding="utf-8")
    return path


def _shaken(value: Any, sigma: float, rng: np.random.Generator) -> Any:
    if isinstance(value, dict):
        return {name: inner if name in _COUNTS | _KEPT else _shaken(inner, sigma, rng) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shaken(inner, sigma, rng) for inner in value]
    return value * math.exp(rng.normal(0.0, sigma)) if isinstance(value, float) else value


def _toml(raw: dict[str, Any]) -> str:
    lines: list[str] = []

    def scalar(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return "[" + ", ".join(map(scalar, value)) + "]"
        return repr(value) if isinstance(value, (int, float)) else '"' + value.replace('"', "'") + '"'

    def emit(table: dict[str, Any], path: str) -> None:
        inner = {name: one for name, one in table.items() if isinstance(one, dict)}
        many = {name: one for name, one in table.items() if isinstance(one, list) and one and isinstance(one[0], dict)}
        lines.extend(f"{name} = {scalar(one)}" for name, one in table.items() if name not in inner and name not in many)
        for name, one in inner.items():
            lines.append(f"[{path}{name}]")
            emit(one, f"{path}{name}.")
        for name, rows in many.items():
            for row in rows:
                lines.append(f"[[{path}{name}]]")
                emit(row, f"{path}{name}.")

    emit(raw, "")
    return "\n".join(lines) + "\n"
