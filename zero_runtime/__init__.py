"""ZeRO 1, 2 and 3 on torch: shards optimizer states, gradients and parameters of any module, in place."""

from __future__ import annotations

from zero_runtime.engine import Engine, shard
from zero_runtime.errors import CheckpointError, LifecycleError, SettingsError, ZeroError
from zero_runtime.settings import Settings

__all__ = [
    "CheckpointError",
    "Engine",
    "LifecycleError",
    "Settings",
    "SettingsError",
    "ZeroError",
    "shard",
]
