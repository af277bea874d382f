"""The weights that ship with the package."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Final

from .encoders import LstmEncoder

_log = logging.getLogger("zerotune.stage")

SHIPPED: Final = Path(__file__).parent / "weights" / "lstm.weights"


@lru_cache(maxsize=1)
def default_encoder() -> LstmEncoder | None:
    """The shipped encoder; None if its weights cannot be read: no stage is recognised then."""
    try:
        return LstmEncoder.from_bytes(SHIPPED.read_bytes())
    except (OSError, ValueError) as error:
        _log.warning("the shipped weights cannot be used: %s", error)
        return None
