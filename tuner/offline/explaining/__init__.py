"""`zerotune explain`: the reason for each setting, from the store's decisions and measurements."""

from __future__ import annotations

from .job import explain, head_of

__all__ = ["explain", "head_of"]
