"""Run summaries: the JSON files of `launch --summary`, one run each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from store.errors import UserError

MAX_FILE_BYTES: Final = 2**29
"""A summary has some 150 bytes per step."""


class SummaryStep(msgspec.Struct, frozen=True):
    """One step of a run summary."""

    step: int
    duration_us: float
    exposed_us: float | None = None
    loss_hex: str = ""
    epoch: int = 0


class Summary(msgspec.Struct, frozen=True):
    """One run for the before-and-after comparison, as a JSON file."""

    steps: tuple[SummaryStep, ...]
    label: str = ""
    """What the pictures call the run; the file's name where it does not say."""
    emulated: bool = False
    fabric: str | None = None
    n_disagreements: int | None = None
    n_ranks: int = 0


def read_summary(path: Path) -> Summary:
    """A run summary.

    Raises:
        UserError: it cannot be read, or is not one.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path} is over {MAX_FILE_BYTES} bytes", "use one written by --summary")
        summary = msgspec.json.decode(path.read_bytes(), type=Summary)
        return summary if summary.label else msgspec.structs.replace(summary, label=path.stem)
    except OSError as error:
        raise UserError(f"cannot read the run summary {path}: {error.strerror}", "check the path") from error
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is not a run summary: {error}", "use one written by --summary") from error
