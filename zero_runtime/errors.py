"""What can go wrong, as a tree; each message is one sentence that names the value found and the remedy.

ZeroError
├── SettingsError     a wrong stage, precision, world or model, or another argument that cannot be right
├── LifecycleError    a parameter was used, moved or replaced outside its life cycle
└── CheckpointError   a checkpoint that is missing, incomplete or of another model
"""

from __future__ import annotations


class ZeroError(Exception):
    """Root of every error that this runtime raises."""


class SettingsError(ZeroError, ValueError):
    """An argument cannot be right, or model, world and settings do not fit; where ranks meet, raised on all of them."""


class LifecycleError(ZeroError, RuntimeError):
    """A parameter was asked to do what its place in the life cycle forbids."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint cannot be read, is incomplete, or belongs to another model."""
