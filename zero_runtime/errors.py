"""The runtime's errors; each message is one sentence that names the value found and the remedy.

ZeroError
├── SettingsError     a wrong stage, precision, world or model, or another invalid argument
├── LifecycleError    a parameter was used, moved or replaced outside its life cycle
└── CheckpointError   a checkpoint that is missing, incomplete or of another model
"""

from __future__ import annotations


class ZeroError(Exception):
    """Root of every error that this runtime raises."""


class SettingsError(ZeroError, ValueError):
    """An argument is invalid, or model, world and settings do not fit; collective calls raise this on all ranks."""


class LifecycleError(ZeroError, RuntimeError):
    """A parameter was used in a way that its state in the life cycle forbids."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint cannot be read, is incomplete, or belongs to another model."""
