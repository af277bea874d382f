"""DDP in processes of mp.spawn, without torchrun."""

import os
import socket

import torch
import torch.distributed as dist
import toy
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

N_RANKS = 2


def rank_main(rank, options, port):
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=N_RANKS)
    model = DistributedDataParallel(toy.model(options))
    toy.train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), options, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(rank_main, (toy.parser().parse_args(), port), nprocs=N_RANKS)
