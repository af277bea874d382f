"""Trains under torchrun with checkpoints; on the first attempt rank 1 kills itself where it is told to.

torchrun ... autotuned_job.py FOLDER BACKEND STAGE {plain,fine,autotune} [{step,boundary} STEP]

Each rank appends to FOLDER/rankN.txt a line for each step: attempt, step, loss to the last bit, what the step ran with.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerotune.agent.nccl.emulated  # noqa: F401  (registers the backend)
from zerotune import zero_runtime
from zerotune.zero_runtime.autotune.choices import FINEST

N_STEPS, SAVED_EVERY, BUCKET_BYTES = 32, 6, 4096


class Fatal(torch.optim.AdamW):
    """Adam; its process dies at the end of an update, where the others reach the boundary."""

    is_last = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


def main() -> None:
    folder, stage, way = Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4]
    place, at = (sys.argv[5], int(sys.argv[6])) if len(sys.argv) > 5 else ("", -1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group(sys.argv[2])
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)), nn.Linear(24, 4))
    bucket_bytes = BUCKET_BYTES // FINEST if way == "fine" else BUCKET_BYTES
    engine = zero_runtime.shard(model, stage=stage, bucket_bytes=bucket_bytes, autotune=way == "autotune")
    optimizer = engine.optimizer(Fatal, lr=0.01)
    saved = folder / "checkpoints"
    begin = engine.load_checkpoint(saved)["step"] if attempt else 0
    with (folder / f"rank{rank}.txt").open("a") as log:
        for n in range(begin, N_STEPS):
            dies = rank == 1 and attempt == 0 and n == at
            ran = engine.step_settings
            draw = torch.Generator().manual_seed(100 * n + rank)
            loss = model(torch.randn(8, 24, generator=draw)).square().mean()
            if dies and place == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.is_last = dies
            optimizer.step()
            optimizer.zero_grad()
            print(attempt, n, loss.item().hex(), *(ran or ()), file=log, flush=True)
            if (n + 1) % SAVED_EVERY == 0:
                engine.save_checkpoint(saved, n + 1)
    dist.destroy_process_group()


main()
