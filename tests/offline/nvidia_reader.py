"""What NVIDIA's example tuner plugin makes of a file, step for step: its C functions restated, with their traps.

After plugins/tuner/example/plugin.c of NVIDIA/nccl at 136405b5 (2.28): fgets with 256 bytes, strtok (which skips
empty fields), strtoull and atoi (which read as many digits as there are), names by strcmp with silent defaults,
first match wins, one channel unless a row says otherwise.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_LINE = 256
COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")


class Row(NamedTuple):
    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    n_channels: int
    n_nodes: int
    n_ranks: int
    n_pipe_ops: int = -1
    registered: int = -1


class Answer(NamedTuple):
    """What the plugin tells NCCL; algorithm None: the cost table is left alone."""

    algorithm: str | None
    protocol: str | None
    n_channels: int


def _integer(text: str) -> int:
    found = re.match(r"\s*[+-]?\d+", text)
    return int(found[0]) if found else 0


def load(text: str) -> list[Row]:
    lines = [
        part for line in text.splitlines(keepends=True) for part in re.findall(rf"(?s).{{1,{MAX_LINE - 1}}}", line)
    ]
    rows = []
    for line in lines:
        if line[0] in "#\n":
            continue
        fields = [field.strip(" \t") for field in line.rstrip("\n").split(",") if field != ""][:10]
        if len(fields) < 8:
            continue
        named = (
            fields[0] if fields[0] in COLLECTIVES else "allreduce",
            _integer(fields[1]) % 2**64,
            _integer(fields[2]) % 2**64,
            fields[3] if fields[3] in ALGORITHMS else "ring",
            fields[4] if fields[4] in PROTOCOLS else "simple",
        )
        rows.append(Row(*named, *map(_integer, fields[5:])))
    return rows


def ask(
    rows: list[Row], collective: str, message_bytes: int, n_nodes: int, n_ranks: int, ignored: frozenset = frozenset()
) -> Answer:
    """getCollInfo for one pipeline operation on unregistered buffers; `ignored` are IGNORE cells."""
    n_channels = 1
    for row in rows:
        if (
            row.collective == collective
            and row.min_bytes <= message_bytes <= row.max_bytes
            and row.n_nodes in (-1, n_nodes)
            and row.n_ranks in (-1, n_ranks)
            and row.n_pipe_ops in (-1, 1)
            and row.registered in (-1, 0)
        ):
            if (row.algorithm, row.protocol) in ignored:
                return Answer(None, None, n_channels)
            if row.n_channels != -1:
                n_channels = row.n_channels
            return Answer(row.algorithm, row.protocol, n_channels)
    return Answer(None, None, n_channels)
