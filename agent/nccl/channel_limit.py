"""The limit of a communicator's channels by NCCL_MAX_CTAS and its older name, NCCL_MAX_NCHANNELS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...store.errors import UserError

LIMITS: Final = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")


def channel_limit(environment: Mapping[str, str], n_channels: int, configured: int | None = None) -> int:
    """Channels of a communicator that would have `n_channels`.

    The communicator's own `maxCTAs` is `configured`, which a variable overrides.

    Raises:
        UserError: a variable is not a positive number.
    """
    for variable in LIMITS:
        text = environment.get(variable, "").strip()
        if text:
            if not text.isdecimal() or int(text) < 1:
                raise UserError(f"{variable}={text!r} is not a number of channels", "say 8, for example, or unset it")
            n_channels, configured = min(n_channels, int(text)), None
    return n_channels if configured is None else min(n_channels, configured)
