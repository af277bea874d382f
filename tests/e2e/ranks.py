"""Starts a script or `-m MODULE` as N ranks of this node: `python ranks.py N COMMAND...`.

What torchrun does where nothing restarts, without the seconds that it needs to import torch.
"""

import os
import signal
import socket
import subprocess
import sys


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


n_ranks, *command = sys.argv[1:]
job = {"WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
ranks = [
    subprocess.Popen([sys.executable, *command], env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    for rank in range(int(n_ranks))
]
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
sys.exit(max(abs(rank.wait()) for rank in ranks))
