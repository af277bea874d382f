"""Of a claim that is tried on several draws and fabrics, the suite tries the first; `-m slow` the others."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tried = set()
    for item in items:
        claim = item.nodeid.partition("[")[0]
        if claim in tried and claim.startswith("tests/brain/"):
            item.add_marker(pytest.mark.slow)
        tried.add(claim)
