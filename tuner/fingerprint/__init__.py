"""What kind of training the bare sequence of collectives shows; docs/design/stage-fingerprint.md."""

from zerotune.tuner.fingerprint.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.labels import Shown

__all__ = ["Shown", "StageFingerprint"]
