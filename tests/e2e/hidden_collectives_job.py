"""A ZeRO-3 job on the emulated NCCL whose gathers and scatters of 4 MB hide behind computation.

    python hidden_collectives_job.py STEPS

Computation is told to the emulation's clock, which slows it down while collectives hold channels.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from zerotune import zero_runtime
from zerotune.agent.nccl.emulated.device import clock

N_LAYERS = 4
WIDTH = 1024
FORWARD_US = 100.0


class Computes(torch.autograd.Function):
    """Passes its argument on; backward takes twice as long as forward."""

    @staticmethod
    def forward(context, x):
        clock.mark_compute_us(FORWARD_US)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        clock.mark_compute_us(2 * FORWARD_US)
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        return Computes.apply(x @ self.weight)


def main(n_steps):
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(N_LAYERS)])
    engine = zero_runtime.shard(model, stage=3)
    optimizer = engine.optimizer(torch.optim.SGD, lr=1e-4)
    x = torch.randn(2, WIDTH)
    for _ in range(n_steps):
        model(x).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
