"""The training process of overhead.py: our example, with the agent's own code timed from outside."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
import torch  # noqa: F401 - activates the agent before anything is timed

AGENT_THREADS = ("zerotune",)


def main() -> None:
    out, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from zerotune.agent import activate
    from zerotune.zero_runtime import phases

    agent_on = os.environ.get("ZEROTUNE_AGENT") == "1"
    spent_ns = [0]
    boundaries_us: list[float] = []
    installed = activate.installed
    if agent_on:
        assert installed is not None
        hooks = installed.hooks
        region, boundary = hooks._on_region, hooks._on_boundary

        def timed_region(word: int) -> None:
            began = time.perf_counter_ns()
            region(word)
            spent_ns[0] += time.perf_counter_ns() - began

        def timed_boundary() -> None:
            began = time.perf_counter_ns()
            boundary()
            took = time.perf_counter_ns() - began
            spent_ns[0] += took
            boundaries_us.append(took / 1000)

        hooks._on_region, hooks._on_boundary = timed_region, timed_boundary
        set_listener = phases.set_listener

        def set_timed_listener(listener: Callable[[str], None] | None) -> None:
            def timed_listener(name: str) -> None:
                assert listener is not None
                began = time.perf_counter_ns()
                listener(name)
                spent_ns[0] += time.perf_counter_ns() - began

            set_listener(timed_listener)

        phases.set_listener = set_timed_listener

    def threads_ns() -> int:
        """CPU time so far of the agent's background threads."""
        return sum(
            time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread.name.startswith(AGENT_THREADS) and thread.ident is not None
        )

    ends = []  # (end of the step, agent's time on the training thread, agent's threads' time), all so far
    register_optimizer_step_post_hook(lambda *_: ends.append((time.perf_counter_ns(), spent_ns[0], threads_ns())))

    from zerotune.zero_runtime.examples import train

    train.main()
    # The first steps pay once for joining the other ranks and for loading the knowledge of earlier jobs.
    warm = ends[len(ends) // 2 :]
    steps_us = [(b[0] - a[0]) / 1000 for a, b in pairwise(warm)]
    n_steps = len(steps_us)
    training_us = (warm[-1][1] - warm[0][1]) / 1000 / n_steps
    background_us = (warm[-1][2] - warm[0][2]) / 1000 / n_steps
    if os.environ["RANK"] == "0":
        document = {
            "step_us": median(steps_us),
            "training_us_per_step": training_us,
            "agent_us_per_step": training_us + background_us,
            "boundary_p50_us": median(boundaries_us) if boundaries_us else 0.0,
            "rss_mb": psutil.Process().memory_info().rss / 2**20,
            "agent_start_s": installed.start_s if agent_on and installed else 0.0,
        }
        out.write_text(json.dumps(document))


if __name__ == "__main__":
    main()
