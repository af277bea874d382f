"""--numerics exact keeps all bits where the order of sums goes with the setting; without it bits change."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.agent.rounding import bits_changed


@pytest.mark.slow
def test_exact_keeps_all_bits_where_other_settings_round_otherwise(tmp_path: Path) -> None:
    exact, usual = bits_changed(tmp_path)
    assert exact == 0
    assert usual > 0
