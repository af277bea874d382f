"""Reports at the end of a job under `launch --plan` if no row of the plan ever matched a call."""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerotune.agent.nccl.library import Plugin

logger = logging.getLogger("zerotune.agent")


def watch(plugin: Plugin, path: Path) -> None:
    """Tell at exit, by rank 0 alone; ranks run the same collectives."""
    if os.environ.get("RANK", "0") == "0":
        atexit.register(tell, plugin, path)


def tell(plugin: Plugin, path: Path) -> None:
    """Print one line if the plan was in force and no row matched a call."""
    counted = plugin.counters()
    if plugin.active_epoch() and counted.n_calls and not counted.n_matched:
        logger.warning(
            "zerotune: no row of %s applied to any collective: this job of %s ranks ran untuned; a row's n_ranks,"
            " n_nodes, collective, phase and bytes must all be those of the job",
            path,
            os.environ.get("WORLD_SIZE", "?"),
        )
