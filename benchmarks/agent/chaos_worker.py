"""One rank of a job in `chaos.py`: trains until a file asks it to stop, and logs each step.

A step's line has its loss and its times in ms: `wall`; `ours`, the longest passage of the training thread through the
agent's code; and `waited`, the longest wait of a call for an outcome so far.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerotune import zero_runtime
from zerotune.agent import activate
from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

N_STEPS_AT_MOST = 1_000_000


class Passages:
    """Time of the training thread in the agent's code, between two calls of `longest_ms`."""

    def __init__(self) -> None:
        self._ms = 0.0
        self._session = activate.installed.session if activate.installed is not None else None
        installed = activate.installed
        if installed is not None:
            hooks = installed.hooks
            hooks._on_region, hooks._on_boundary = self._timed(hooks._on_region), self._timed(hooks._on_boundary)

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*words: int) -> None:
            began_s = time.perf_counter()
            try:
                call(*words)
            finally:
                self._ms = max(self._ms, 1e3 * (time.perf_counter() - began_s))

        return timed

    def longest_ms(self) -> float:
        found, self._ms = self._ms, 0.0
        return found

    def waited_ms(self) -> float:
        """The longest wait of a call for the outcome of a change so far."""
        counters = self._session.agreement_counters() if self._session is not None else None
        return 0.0 if counters is None else counters.longest_wait_us / 1e3


def sharded(runtime: str, model: Any) -> tuple[Any, Any]:
    if runtime == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = zero_runtime.shard(model, stage=3)
    return model, engine.optimizer(torch.optim.AdamW, lr=1e-3)


def main() -> None:
    runtime, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group()
    torch.manual_seed(0)
    shape = GPTShape(n_layers=2, width=32)
    model, optimizer = sharded(runtime, GPT(shape))
    draw = torch.Generator().manual_seed(dist.get_rank())
    is_first = dist.get_rank() == 0
    passages = Passages()
    with open(folder / f"{os.getpid()}.{dist.get_rank()}.jsonl", "w", buffering=1) as log:
        began_s = time.perf_counter()
        for _ in range(N_STEPS_AT_MOST):
            tokens = torch.randint(255, (1, shape.n_context + 1), generator=draw)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told = torch.tensor([loss.item(), float(is_first and (folder / "stop").exists())])
            dist.all_reduce(told)
            now_s = time.perf_counter()
            times_ms = {"wall": 1e3 * (now_s - began_s), "ours": passages.longest_ms(), "waited": passages.waited_ms()}
            print(json.dumps({"loss": float(told[0]).hex(), **times_ms}), file=log)
            began_s = now_s
            if told[1]:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
