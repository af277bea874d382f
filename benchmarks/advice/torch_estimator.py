"""What torch's own estimator says of a published run's peak memory: `torch.distributed._tools.FSDPMemTracker`.

It runs a model's code on tensors without memory and follows every one of them. The tables state no code, so this is the
plainest model of a run's dimensions, under FSDP2 on a process group that sends nothing; ZeRO-2 is FSDP2 that keeps
parameters until backward is over. It knows no context of CUDA and no fragments, and follows one micro-batch. AdamW
is the plain one: of the fused and grouped ones the tracker counts temporaries that no GPU makes.

torch's other estimators answer nothing here: its runtime estimator, and the planner of recomputation on top, ask a
GPU for its peak.

Run, for one run's number: python -m benchmarks.advice.torch_estimator NAME
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.advice.published_runs import PublishedRun, published_runs

TIMEOUT_S = 600
"""Of one run, which takes ten seconds on an idle core."""


class _Block(nn.Module):
    """Attention and feed-forward, gated where the run's is."""

    def __init__(self, run: PublishedRun, recomputed: bool) -> None:
        super().__init__()
        self.run, self.recomputed = run, recomputed
        head = run.width // run.n_heads
        shared = head * (run.n_kv_heads or run.n_heads)
        self.before, self.between = nn.RMSNorm(run.width), nn.RMSNorm(run.width)
        self.query, self.out = nn.Linear(run.width, run.width, False), nn.Linear(run.width, run.width, False)
        self.key, self.value = nn.Linear(run.width, shared, False), nn.Linear(run.width, shared, False)
        self.up, self.down = nn.Linear(run.width, run.ffn_width, False), nn.Linear(run.ffn_width, run.width, False)
        self.gate = nn.Linear(run.width, run.ffn_width, False) if run.gated else None

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed:
            found: Tensor = checkpoint(self._forward, x, use_reentrant=False)
            return found
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        head = width // self.run.n_heads
        normed = self.before(x)
        parts = [
            part(normed).view(rows, length, -1, head).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        query, *shared = parts
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in shared)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        normed = self.between(x)
        inner = F.gelu(self.up(normed)) if self.gate is None else F.silu(self.gate(normed)) * self.up(normed)
        out: Tensor = x + self.down(inner)
        return out


class _Model(nn.Module):
    """Tokens to loss."""

    def __init__(self, run: PublishedRun) -> None:
        super().__init__()
        every = {"none": 0, "half": 2, "selective": 2, "full": 1}[run.recompute]
        self.embedding = nn.Embedding(run.vocabulary, run.width)
        self.blocks = nn.ModuleList(_Block(run, bool(every) and i % every == 0) for i in range(run.n_layers))
        self.norm, self.head = nn.RMSNorm(run.width), nn.Linear(run.width, run.vocabulary, False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def peak_bytes(run: PublishedRun) -> int:
    """The tracker's peak over two steps, in this process.

    Args:
        run: of stage 2 or 3.

    Returns:
        Bytes on one GPU.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.n_gpus)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (run.n_gpus,)),
        "mp_policy": policy,
        "reshard_after_forward": run.stage == 3,
    }
    with FakeTensorMode():
        model = _Model(run)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        tokens = torch.zeros((run.micro_batch, run.n_context), dtype=torch.int64)
        tracker.track_inputs((tokens,))
        with tracker:
            for n in range(2):
                model(tokens).backward()  # once: it follows no accumulation
                optimizer.step()
                optimizer.zero_grad()
                if n == 0:
                    tracker.reset_mod_stats()
        found = tracker.get_tracker_snapshot("peak")
    return int(next(iter(found.values()))["Total"])


def torchs_memory_gb(run: PublishedRun) -> float:
    """What torch's estimator says, 10^9 bytes; in a process of its own, since it changes torch.

    Args:
        run: of stage 2 or 3.

    Returns:
        Peak of one GPU.

    Raises:
        CalledProcessError: torch's estimator fails.
    """
    command = [sys.executable, "-m", "benchmarks.advice.torch_estimator", run.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return float(done.stdout.split()[-1]) / 1e9


if __name__ == "__main__":
    print(peak_bytes(next(run for run in published_runs() if run.name == sys.argv[1])))
