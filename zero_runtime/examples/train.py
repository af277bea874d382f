"""Trains the small GPT on CPython's own documentation.

torchrun --nproc-per-node 2 zero_runtime/examples/train.py --stage 3 --steps 20 --print-every 1
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics

import torch
import torch.distributed as dist

from zerotune import zero_runtime
from zerotune.zero_runtime.examples.gpt import GPT, GPTShape


def main() -> None:
    """Trains, and logs the mean loss over ranks at each step; prints it at some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = {"stage": 3, "steps": 20, "batch": 4, "layers": 4, "width": 128, "seed": 0, "print-every": 50}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    parser.add_argument("--precision", default=None, help="bf16 or fp16; fp32 by default")
    parser.add_argument("--losses", help="file for one JSON line per step, written by rank 0")
    options = parser.parse_args()

    dist.init_process_group()
    torch.manual_seed(options.seed)
    text = "".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    shape = GPTShape(n_layers=options.layers, width=options.width)
    model = GPT(shape)
    engine = zero_runtime.shard(model, stage=options.stage, precision=options.precision)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
    draw = torch.Generator().manual_seed(options.seed * 1000 + dist.get_rank())
    path = options.losses if options.losses and dist.get_rank() == 0 else os.devnull
    with open(path, "w", buffering=1) as log:
        for step in range(options.steps):
            starts = torch.randint(len(data) - shape.n_context - 1, (options.batch,), generator=draw)
            rows = torch.stack([data[i : i + shape.n_context + 1] for i in starts.tolist()])
            loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            value = mean.item() / dist.get_world_size()
            if dist.get_rank() == 0:
                line = json.dumps({"step": step, "loss": value, "loss_hex": value.hex()})
                if step % options.print_every == 0 or step + 1 == options.steps:
                    print(line, flush=True)
                print(line, file=log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
