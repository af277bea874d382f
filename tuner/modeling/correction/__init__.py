"""The learned correction of NCCL's cost: training sets, models, and their values on a grid."""

from .baked import BAKED_VERSION, Baked, Correction

__all__ = ["BAKED_VERSION", "Baked", "Correction"]
