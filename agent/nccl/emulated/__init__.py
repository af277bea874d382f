"""An NCCL for machines without GPUs: importing it registers the torch.distributed backend `emulated_nccl`.

What runs, how long it takes on a virtual clock and what is not modelled: docs/emulated.md.
"""

from __future__ import annotations

import torch.distributed as dist

from agent.nccl.emulated.capture import Graph
from agent.nccl.emulated.errors import (
    CallMismatch,
    CollectiveTimeout,
    DeviceOutOfMemory,
    EmulatedNcclError,
    PeerLost,
    SettingDisagreement,
)
from agent.nccl.emulated.journal import Journal, JournalCall, journal
from agent.nccl.emulated.memory import memory_pressure
from agent.nccl.emulated.process_group import BACKEND, EmulatedProcessGroup, create

__all__ = [
    "BACKEND",
    "CallMismatch",
    "CollectiveTimeout",
    "DeviceOutOfMemory",
    "EmulatedNcclError",
    "EmulatedProcessGroup",
    "Graph",
    "Journal",
    "JournalCall",
    "PeerLost",
    "SettingDisagreement",
    "journal",
    "memory_pressure",
]

if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
