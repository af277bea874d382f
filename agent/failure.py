"""How the user's script failed, as far as Python records it; it does not record `sys.exit(1)`."""

from __future__ import annotations

import os
import sys
from typing import Final

from ..store import wire
from .settings import ENV_FABRIC

MAX_WORDS: Final = 300
_CUDA_WORDS: Final = ("cuda", "nvidia", "no gpus found", "have nccl")
"""Words, in small letters, of torch's errors when it finds no GPU."""


def failure() -> str:
    """Type of the exception that ended the script; empty: no exception did."""
    name: str = getattr(getattr(sys, "last_type", None), "__name__", "")
    return name.encode("ascii", "replace").decode()[: wire.MAX_ID_LENGTH]


def describe_failure() -> str:
    """The exception, the exit status, and a remedy if there was no GPU; empty: no exception, or a signal ended it."""
    if (name := failure()) in ("", "KeyboardInterrupt", "SignalException"):  # the latter is torchrun's
        return ""
    error = getattr(sys, "last_value", None)
    status = getattr(error, "exit_code", 1)
    first = getattr(error, "get_first_failure", None)  # torchrun's exception has it, for the rank that failed first
    if callable(first):
        rank, failed = first()
        name, status = f"rank {rank}", failed.exitcode
    return f"{name}, exit status {status}{_without_gpu(str(error).lower())}"[:MAX_WORDS]


def _without_gpu(text: str) -> str:
    torch = sys.modules.get("torch")
    if torch is None or not any(words in text for words in _CUDA_WORDS):
        return ""
    if torch.cuda.is_initialized() or torch.cuda.is_available():  # after an error the GPU may seem unavailable
        return ""
    if os.environ.get(ENV_FABRIC):
        return "; --fabric emulates NCCL alone: let the script use the CPU where there is no GPU"
    return "; torch finds no GPU here: `zerotune launch --fabric h100_node` emulates NCCL without one"
