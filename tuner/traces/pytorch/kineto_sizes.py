"""Sizes of a call in a Kineto trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..records import MAX_BYTES, UNKNOWN_U4


def rank_count(value: Any) -> int:
    """A number of ranks; 0 if it is impossible."""
    n_ranks = integer(value)
    return n_ranks if n_ranks is not None and 0 < n_ranks <= UNKNOWN_U4 else 0


def n_listed(args: Mapping[str, Any]) -> int:
    """Ranks in a call's list; 0: there is no list, or a long one, which torch truncates."""
    ranks = args.get("Process Group Ranks")
    listed = ranks if isinstance(ranks, list) else str(ranks or "").strip("[]").split(",")
    return len(listed) if all(str(rank).strip().isdigit() for rank in listed) else 0


def group_sizes(groups: Any) -> dict[str, dict[str, int]]:
    """Name of a group -> its ranks by the trace's description of the job."""
    return {
        str(group.get("pg_name"))[:400]: {
            "its description": rank_count(group.get("pg_size")),
            "the ranks that it lists": len(ranks) if isinstance(ranks := group.get("ranks"), list) else 0,
        }
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, Mapping)
    }


def side_bytes(n_elements: Any, width: int | None) -> int | None:
    """Bytes of one side of a call; None if the trace does not tell."""
    if type(n_elements) is not int or width is None or not 0 < n_elements <= MAX_BYTES:
        return None
    return n_elements * width


def integer(value: Any) -> int | None:
    """A whole number, perhaps as JSON text; None: it is something else."""
    if isinstance(value, str) and len(value) < 20:
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if type(value) is int and -(1 << 62) < value < 1 << 62 else None
