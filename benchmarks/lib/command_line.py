"""`zerotune` called in this process: a process of its own takes most of a second to start."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from zerotune.tuner import cli


class Said(NamedTuple):
    code: int
    out: str
    err: str


def zerotune(*words: object) -> Said:
    code: object = 0
    with (
        patch.object(sys, "argv", ["zerotune", *map(str, words)]),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
    assert isinstance(code, int)
    return Said(code, out.getvalue(), err.getvalue())
