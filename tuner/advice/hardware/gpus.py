"""GPUs by their makers' datasheets."""

from __future__ import annotations

from typing import Final

import msgspec

from ....store.errors import UserError

MIB: Final = 1 << 20


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; rates without sparsity."""

    name: str
    capability: int
    """90 = 9.0."""
    memory_bytes: int
    """Memory that programs can use, as nvidia-smi shows it."""
    peak_tflops: float
    """Peak of 16-bit matrix multiplication."""
    fp32_tflops: float
    """Peak of 32-bit matrix multiplication, with TF32 if the GPU has it."""
    memory_gbs: float
    cpu_gbs: float
    """Bandwidth to CPU memory, one way."""

    def peak(self, precision: str) -> float:
        """TFLOP/s in "fp32", "bf16" or "fp16"."""
        return self.fp32_tflops if precision == "fp32" else self.peak_tflops


def _gpu(
    name: str, capability: int, memory_mib: int, peak: float, fp32: float, memory_gbs: float, cpu_gbs: float
) -> Gpu:
    return Gpu(
        name=name,
        capability=capability,
        memory_bytes=memory_mib * MIB,
        peak_tflops=peak,
        fp32_tflops=fp32,
        memory_gbs=memory_gbs,
        cpu_gbs=cpu_gbs,
    )


GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        _gpu("v100_16gb", 70, 16160, 125, 15.7, 900, 12),
        _gpu("v100_32gb", 70, 32510, 125, 15.7, 900, 12),
        _gpu("a100_40gb", 80, 40536, 312, 156, 1555, 25),
        _gpu("a100_80gb", 80, 81251, 312, 156, 2039, 25),
        _gpu("a800_80gb", 80, 81251, 312, 156, 2039, 25),
        _gpu("l40s_48gb", 89, 46068, 362, 183, 864, 25),
        _gpu("h100_80gb", 90, 81559, 989, 495, 3350, 50),
        _gpu("h100_96gb", 90, 97871, 989, 495, 2400, 50),
        _gpu("h200_141gb", 90, 143771, 989, 495, 4800, 50),
        _gpu("b200_180gb", 100, 183359, 2250, 1125, 8000, 50),
    )
}
USUAL: Final = {70: "v100_32gb", 80: "a100_80gb", 89: "l40s_48gb", 90: "h100_80gb", 100: "b200_180gb"}
"""Assumed GPU by compute capability of a machine."""


def gpu(name: str) -> Gpu:
    """The GPU of this name; UserError if the table does not have it."""
    if name not in GPUS:
        raise UserError(f"{name!r} is no GPU of the table", f"name one of {', '.join(GPUS)}")
    return GPUS[name]


def usual(capability: int) -> Gpu:
    """The assumed GPU of a machine with this compute capability: the newest that is not newer."""
    return GPUS[USUAL[max((known for known in USUAL if known <= capability), default=min(USUAL))]]
