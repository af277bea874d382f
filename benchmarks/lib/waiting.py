from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Raises AssertionError if `is_so()` does not become true within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not so within {timeout_s} s"
        time.sleep(0.005)
