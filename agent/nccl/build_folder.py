"""Where compiled files go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

INSTALLATIONS: Final = frozenset({"site-packages", "dist-packages"})


def may_hold_builds(sources: Path) -> bool:
    """Whether what is compiled of `sources` may stand beside them: in a checkout that can be written.

    Not in an installation: what pip has not put there it does not remove, and a folder that is left of the package
    hides the one that is installed next.
    """
    return INSTALLATIONS.isdisjoint(sources.parts) and os.access(sources, os.W_OK)
