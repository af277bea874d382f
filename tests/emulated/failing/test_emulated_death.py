"""A killed rank: the others end with an error soon, and nothing of it stays on the machine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_world import World

from zerotune.agent.nccl.emulated import PeerLost


def _reduce(rank: int) -> Any:
    began_s = time.monotonic()
    try:
        dist.all_reduce(torch.ones(100_000))
    except PeerLost as error:
        return str(error), time.monotonic() - began_s
    return "", time.monotonic() - began_s


def _wrap(rank: int) -> bool:
    """DDP waits for futures in C++, where an error must not pass for tensors."""
    global _model
    _model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(2):  # in the second forward DDP arranges its buckets anew
        _model(torch.ones(2, 8)).sum().backward()
    return True


def _backward(rank: int) -> Any:
    began_s = time.monotonic()
    try:
        _model(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - began_s
    return "", time.monotonic() - began_s


def _mappings(rank: int) -> tuple[int, int]:
    """Anonymous files of ours in memory, and files there that have a name and could be left behind."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:zerotune-emulated"), maps.count(" /dev/shm/")


def test_the_others_notice_a_killed_rank_and_nothing_is_left(tmp_path: Path) -> None:
    world = World(3, tmp_path, ZEROTUNE_FABRIC="ethernet_boxes")
    try:
        assert all(text == "" for text, _ in world.run(_reduce))
        assert world.run(_mappings) == [(1, 0)] * 3
        assert world.run(_wrap) == [True] * 3
        for rank, waits in enumerate((_reduce, _backward)):
            world.send(rank, waits)
        time.sleep(0.1)  # they wait by now
        assert world.processes[2].pid is not None
        os.kill(world.processes[2].pid, signal.SIGKILL)
        for rank in (0, 1):
            text, seconds = world.receive(rank)
            assert "rank 2 of 3 ended" in text
            assert seconds < 2
        for process in world.processes[:2]:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
    finally:
        world.close()
