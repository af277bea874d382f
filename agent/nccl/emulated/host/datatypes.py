"""NCCL's data types by torch's."""

from __future__ import annotations

from typing import Final

import torch

DATATYPES: Final = {
    torch.int8: (0, b"ncclInt8"),
    torch.uint8: (1, b"ncclUint8"),
    torch.bool: (1, b"ncclUint8"),
    torch.int32: (2, b"ncclInt32"),
    torch.int64: (4, b"ncclInt64"),
    torch.float16: (6, b"ncclFloat16"),
    torch.float32: (7, b"ncclFloat32"),
    torch.float64: (8, b"ncclFloat64"),
    torch.bfloat16: (9, b"ncclBfloat16"),
}
"""ncclDataType_t and its name."""
BYTES: Final = (255, b"ncclInt8")
"""For types that NCCL does not have."""
