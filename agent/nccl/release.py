"""The emulated release of NCCL or RCCL, and its differences that a plugin can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ...store.errors import UserError

DEFAULT: Final = "2.28.9"

_TUNER_ABIS: Final = (((2, 30), 6), ((2, 28), 5), ((2, 24), 4), ((2, 22), 3), ((2, 21), 2))
_PROFILER_ABIS: Final = (((2, 31), 7), ((2, 29), 6), ((2, 28), 5), ((2, 27), 4), ((2, 26), 3))
"""Older profiler ABIs report no times of kernels."""


class Release(NamedTuple):
    """A release; versions compare as tuples. RCCL, AMD's fork, has the number of the NCCL release that it follows."""

    version: tuple[int, ...]
    is_rccl: bool = False

    def __str__(self) -> str:
        return ("RCCL " if self.is_rccl else "NCCL ") + ".".join(map(str, self.version))

    @property
    def tuner_abi(self) -> int:
        """Newest version of the tuner ABI that it supports."""
        return _newest(_TUNER_ABIS, self.version)

    @property
    def profiler_abi(self) -> int:
        """Newest version of the profiler ABI that it supports; 0: none with times of kernels."""
        return _newest(_PROFILER_ABIS, self.version)

    @property
    def n_algorithms(self) -> int:
        """Rows of the cost table: 2.23 added PAT."""
        return 7 if self.version >= (2, 23) else 6

    @property
    def profiler_prefix(self) -> str:
        """Prefix of a profiler's file name; that of tuners is libnccl-tuner in NCCL and RCCL."""
        return "librccl-profiler" if self.is_rccl else "libnccl-profiler"

    @property
    def has_symmetric_kernels(self) -> bool:
        """Whether collectives on registered buffers do not ask the tuner."""
        return not self.is_rccl and self.version >= (2, 27)

    @property
    def has_copy_engines(self) -> bool:
        """Whether all_gather can be done without a kernel."""
        return not self.is_rccl and self.version >= (2, 28)

    @property
    def checks_tuner(self) -> bool:
        """Whether it checks that a tuner's cell exists on this machine."""
        return self.version >= (2, 22)

    @property
    def connects_at_first_use(self) -> bool:
        """Older releases connect ring and tree when the communicator is made."""
        return self.version >= (2, 22)


def release(environment: Mapping[str, str]) -> Release:
    """The release that `ZEROTUNE_NCCL_VERSION` names: "2.27.7", or "rccl-2.27.7"; UserError if it names none."""
    text = environment.get("ZEROTUNE_NCCL_VERSION") or DEFAULT
    number = text.lower().removeprefix("rccl-")
    try:
        version = tuple(int(part) for part in number.split("."))
    except ValueError:
        version = ()
    if len(version) < 2 or version < (2, 21):
        raise UserError(
            f"ZEROTUNE_NCCL_VERSION={text!r} is not an NCCL release from 2.21 on",
            "say 2.28.9 or rccl-2.27.7, for example",
        )
    return Release(version, text.lower().startswith("rccl-"))


def _newest(abis: tuple[tuple[tuple[int, int], int], ...], version: tuple[int, ...]) -> int:
    return next((abi for since, abi in abis if version >= since), 0)
