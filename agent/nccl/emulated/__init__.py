"""An NCCL for machines without GPUs: importing it registers the torch.distributed backend `emulated_nccl`.

docs/design/emulated.md describes what it runs, its virtual clock, and what it does not model.
"""

from __future__ import annotations

import torch.distributed as dist

from .device.memory import memory_pressure
from .errors import CallMismatch, CollectiveTimeout, DeviceOutOfMemory, EmulatedNcclError, PeerLost, SettingDisagreement
from .journal import Journal, JournalCall, journal
from .torch_backend.alias import BACKEND
from .torch_backend.capture import Graph
from .torch_backend.process_group import EmulatedProcessGroup, create
from .torch_backend.shrinking import keep_shrunk_groups

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
    keep_shrunk_groups(EmulatedProcessGroup)
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
