"""Recognises the kind of training from the sequence of collectives alone; docs/design/stage-fingerprint.md."""

from .fingerprint import StageFingerprint
from .labels import Shown

__all__ = ["Shown", "StageFingerprint"]
