"""Draws what M_D does: a recorded training step, with and without contiguous buffers, replayed into a heap.

python -m zerotune.zero_runtime.examples.contiguous_buffers
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zerotune import zero_runtime
from zerotune.zero_runtime.examples.gpt import GPTShape
from zerotune.zero_runtime.examples.tensor_parallel_gpt import ParallelGPT
from zerotune.zero_runtime.layout import fragmentation
from zerotune.zero_runtime.layout.contiguous_buffers import Arena
from zerotune.zero_runtime.stages.activations import PartitionedActivations

SHAPE = GPTShape(n_layers=8, width=128, n_context=64)
N_BATCH = 4


def heap_of_step(contiguous: bool, group: dist.ProcessGroup) -> fragmentation.Heap:
    """Forward and backward of a checkpointed GPT on one rank; whole gradients are alive when it ends.

    Args:
        contiguous: checkpoints lie in an arena, gradients in stage 1's buffer, both allocated before; otherwise each of
            them is a tensor of its own, as torch does it.
        group: the one rank, which is both the model-parallel and the data-parallel group.
    """
    torch.manual_seed(0)
    checkpoint_bytes = SHAPE.n_layers * N_BATCH * SHAPE.n_context * SHAPE.width * 4
    arena = Arena(checkpoint_bytes) if contiguous else None
    model = ParallelGPT(SHAPE, group, PartitionedActivations(group, arena=arena))
    rows = torch.randint(SHAPE.n_tokens, (N_BATCH, SHAPE.n_context + 1))

    def backward() -> None:
        model(rows[:, :-1], rows[:, 1:]).backward()

    if arena is not None:
        engine = zero_runtime.shard(model, group=group, stage=1)
        backward()  # allocates the gradients' buffer
        engine.zero_grad()
        arena.reset()
    return fragmentation.replay(fragmentation.record(backward))


def main() -> None:
    """Two rows of memory: `#` in use when the step ends, `.` free."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    for name, contiguous in (("without M_D", False), ("with M_D", True)):
        heap = heap_of_step(contiguous, dist.group.WORLD)
        needed, lost = heap.extent / 2**20, heap.lost / 2**20
        print(f"{name:<12}{fragmentation.draw(heap, 64)}  {needed:.1f} MiB, {lost:.1f} lost in holes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
