"""Torch's own tests of torch.distributed end on the emulated backend as the page says."""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest
import torch


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_torchs_own_tests_end_as_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    release, kept = conformance.kept()
    if torch.__version__.partition("+")[0] != release:
        pytest.skip(f"the page is about torch {release}")
    ended = conformance.run(tmp_path)
    assert {name: verdict.outcome for name, verdict in ended.items()} == kept
    failed = {name for name, verdict in ended.items() if verdict.outcome == "failed"}
    assert failed == set(conformance.KNOWN)
