"""What kind of training the bare sequence of collectives shows; docs/design/stage-fingerprint.md."""

from .fingerprint import StageFingerprint
from .labels import Shown

__all__ = ["Shown", "StageFingerprint"]
