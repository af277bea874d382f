"""Faults of the agreement that tests and benchmarks ask for through the environment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ENV_FAULT: Final = "ZEROTUNE_FAULT_AGREEMENT"
"""`pause:SECONDS@N`: the thread stands still when its change N has come; `fail:N`: its request N to the store fails."""


@dataclass
class AgreementFaults:
    """What goes wrong, and when; nothing by default."""

    pause_s: float = 0.0
    at_change: int = 0
    at_request: int = 0
    _n_changes: int = field(default=0, init=False)
    _n_requests: int = field(default=0, init=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> AgreementFaults:
        """Read `ZEROTUNE_FAULT_AGREEMENT`; what cannot be read asks for nothing."""
        env = os.environ if environment is None else environment
        kind, _, rest = env.get(ENV_FAULT, "").partition(":")
        try:
            if kind == "pause":
                seconds, _, change = rest.partition("@")
                return cls(pause_s=float(seconds), at_change=int(change or "1"))
            if kind == "fail":
                return cls(at_request=int(rest))
        except ValueError:
            pass
        return cls()

    def before_change(self) -> None:
        """A change has come."""
        self._n_changes += 1
        if self._n_changes == self.at_change:
            time.sleep(self.pause_s)

    def before_request(self) -> None:
        """A request is about to be sent.

        Raises:
            RuntimeError: this one was asked to fail.
        """
        self._n_requests += 1
        if self._n_requests == self.at_request:
            raise RuntimeError("a fault that was asked for")
