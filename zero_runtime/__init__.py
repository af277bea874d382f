"""ZeRO 1, 2 and 3 on torch: shards optimizer states, gradients and parameters of any module in place.

Names are loaded on first use, so importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine, shard
    from .errors import CheckpointError, LifecycleError, SettingsError, ZeroError
    from .loss_scaling import LossScaler
    from .settings import Settings

_HOMES = {
    "CheckpointError": "errors",
    "Engine": "engine",
    "LifecycleError": "errors",
    "LossScaler": "loss_scaling",
    "Settings": "settings",
    "SettingsError": "errors",
    "ZeroError": "errors",
    "shard": "engine",
}

__all__ = [
    "CheckpointError",
    "Engine",
    "LifecycleError",
    "LossScaler",
    "Settings",
    "SettingsError",
    "ZeroError",
    "shard",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
