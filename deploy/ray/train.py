"""FSDP2 under Ray Train: `python train.py --workers 16`, with a daemon on each node, or the service for all users.

Ray starts the workers' processes, so it is told to turn the agent on in each of them; and it kills them when their work
is done, so they say when that is.
"""

from __future__ import annotations

import argparse

import ray
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch.distributed.fsdp import fully_shard

import zerotune


def train(settings: dict[str, int]) -> None:
    """What each worker runs, in the process group that Ray has made."""
    torch.manual_seed(0)
    device, width = get_device(), settings["width"]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, device=device) for _ in range(settings["layers"])))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, settings["steps"] + 1):
        loss = model(torch.randn(4, width, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == settings["steps"]:
            ray.train.report({"step": step, "loss": loss.item()})
    zerotune.training_ended()


def main() -> None:
    """Train, and print losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"workers": 2, "steps": 200, "layers": 4, "width": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    options = vars(parser.parse_args())
    ray.init(
        runtime_env={
            "worker_process_setup_hook": "zerotune.enable",  # before Ray makes the process group
            "env_vars": {"ZEROTUNE_JOB_NAME": "ray-train"},
        }
    )
    scaling = ScalingConfig(num_workers=options.pop("workers"), use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config=options, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
