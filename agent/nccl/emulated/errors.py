"""Errors of the emulated NCCL; all are `DistBackendError`s, and so RuntimeErrors, as those of torch's NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ....store.errors import RankDisagreement, ZerotuneError


class EmulatedNcclError(ZerotuneError, dist.DistBackendError):
    """A collective cannot be carried out."""


class SettingDisagreement(RankDisagreement, EmulatedNcclError):
    """`RankDisagreement` as the emulated NCCL raises it."""


class CallMismatch(EmulatedNcclError):
    """Ranks called different collectives, or one collective with different arguments."""


class PeerLost(EmulatedNcclError):
    """A rank ended before it took part in a collective."""


class CollectiveTimeout(EmulatedNcclError):
    """Not all ranks joined a collective within the process group's timeout."""


class DeviceOutOfMemory(EmulatedNcclError, torch.OutOfMemoryError):
    """The emulated device has no memory left for another connection."""
