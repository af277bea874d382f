"""Published training runs: who measured which throughput with which model, cluster and batch.

published_runs.csv has one run per line, with the address of its source. A run is set aside if the SHA-256 of its name
begins with an even byte. From llm-foundry's tables come all bf16 runs of at least 1 billion parameters at 2,048 tokens.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).with_name("published_runs.csv")


@dataclass(frozen=True)
class PublishedRun:
    """One line of the file. `network_gbps` is per node; `shard_ranks` 0: over all; `unit` is the unit of `value`."""

    name: str
    source: str
    framework: str
    gpu: str
    gpus_per_node: int
    n_gpus: int
    network_gbps: float
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    ffn_width: int
    gated: bool
    vocabulary: int
    n_context: int
    stage: int
    shard_ranks: int
    recompute: str
    micro_batch: int
    accumulation: int
    compiled: bool
    flash: bool
    precision: str
    unit: str
    value: float
    memory_gb: float
    """Peak of a GPU, 10^9 bytes; 0: not stated."""
    note: str

    @property
    def publisher(self) -> str:
        """The first word of the name."""
        return self.name.split()[0]

    @property
    def is_set_aside(self) -> bool:
        """No constant may be chosen by such a run."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 0


_KINDS: Final[dict[str, Callable[[str], int | float | str]]] = {
    "int": lambda text: int(text or 0),
    "float": lambda text: float(text or 0),
    "bool": lambda text: text == "1",
    "str": str,
}


def published_runs() -> list[PublishedRun]:
    kinds = {name: _KINDS[kind] for name, kind in PublishedRun.__annotations__.items()}
    with FILE.open(encoding="utf-8", newline="") as lines:
        rows: list[dict[str, Any]] = [
            {name: read(row[name]) for name, read in kinds.items()} for row in csv.DictReader(lines)
        ]
    return [PublishedRun(**row) for row in rows]
