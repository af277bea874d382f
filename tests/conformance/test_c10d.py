"""Torch's own tests of torch.distributed end on the emulated backend as the page says, on both hosts."""

from __future__ import annotations

from pathlib import Path

import conformance
import pytest
import torch

from benchmarks.lib.nccl import nccl_releases


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("host", conformance.HOSTS)
def test_torchs_own_tests_end_as_the_page_says(host: str, tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    if host == "library" and not nccl_releases.library_of(nccl_releases.TESTED[-1]).exists():
        pytest.skip("that NCCL was not fetched: python -m benchmarks nccl_releases")
    release, kept = conformance.kept()
    if torch.__version__.partition("+")[0] != release:
        pytest.skip(f"the page is about torch {release}")
    expected = kept[host]
    if host != conformance.HOSTS[0]:  # what is skipped does not depend on the host
        expected = {name: outcome for name, outcome in expected.items() if outcome != "skipped"}
    names = [] if host == conformance.HOSTS[0] else list(expected)
    ended = conformance.run(host, tmp_path, names)
    assert {name: verdict.outcome for name, verdict in ended.items()} == expected
    failed = {name for name, verdict in ended.items() if verdict.outcome == "failed"}
    assert failed == set(conformance.KNOWN)
