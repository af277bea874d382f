"""The learned correction of NCCL's cost: training sets, models, and the arrays they are baked into."""

from .baked import BAKED_VERSION, Baked, Correction

__all__ = ["BAKED_VERSION", "Baked", "Correction"]
