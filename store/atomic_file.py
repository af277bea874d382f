"""Files that are written completely, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from zerotune.store.errors import UserError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """The path to write to; it replaces `path` when the block ends.

    When anything fails, `path` stays as it was and nothing is left behind. A pipe or a device is written to directly.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    whole = Path(os.path.realpath(path))  # a link goes on being one
    partial = whole.with_name(whole.name + ".partial")
    try:
        yield partial
        partial.replace(whole)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@contextlib.contextmanager
def users_file(path: Path) -> Iterator[Path]:
    """Like `atomic_write`, for a file that the user has named.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with atomic_write(path) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}", "choose another path") from error
