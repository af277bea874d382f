"""M_D: long-lived tensors in one buffer allocated once, so that they do not lie scattered among short-lived ones.

Without it a checkpointed forward leaves: checkpoint │ freed activations │ checkpoint │ freed activations │ …
and the free memory, though large, has no stretch long enough for the next big tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64


class Arena:
    """A contiguous buffer from which tensors are cut one behind another, and all given back at once.

    Args:
        capacity_bytes: what the buffer holds; more goes to ordinary memory, and is counted.
    """

    def __init__(self, capacity_bytes: int, device: torch.device | str = "cpu") -> None:
        self._buffer = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self.used_bytes = 0
        self.peak_bytes = 0
        self.n_outside = 0

    def keep(self, value: Tensor) -> Tensor:
        """A copy of `value` inside the buffer, or outside where it is full."""
        n_bytes = value.numel() * value.element_size()
        end = self.used_bytes + n_bytes
        if end > self._buffer.numel():
            self.n_outside += 1
            return value.clone()
        kept = self._buffer[self.used_bytes : end].view(value.dtype).view(value.shape)
        kept.copy_(value)
        self.used_bytes = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return kept

    def reset(self) -> None:
        """Gives all of it back; tensors kept before must not be used any more."""
        self.used_bytes = 0
