"""What kind of training the bare sequence of collectives shows; docs/stage-fingerprint.md."""

from tuner.stage.fingerprint import StageFingerprint
from tuner.stage.labels import Shown

__all__ = ["Shown", "StageFingerprint"]
