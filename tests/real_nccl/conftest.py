"""Releases of the official libnccl; those that were not fetched are skipped by name.

ZEROTUNE_NCCL_RELEASES names others than those of `make test`: "all", or versions.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.lib.nccl import nccl_releases


def _releases() -> tuple[str, ...]:
    named = os.environ.get("ZEROTUNE_NCCL_RELEASES", "")
    return nccl_releases.ALL if named == "all" else tuple(named.split()) or nccl_releases.TESTED


def _fetched(version):
    library = nccl_releases.library_of(version)
    if not library.exists():  # a quarter of a gigabyte each: `make` fetches them, pytest alone does not
        pytest.skip(f"NCCL {version} was not fetched: python -m benchmarks nccl_releases {version}")
    return tuple(int(part) for part in version.split(".")), library


@pytest.fixture(scope="session", params=_releases())
def release(request):
    """(version, library) of each release."""
    return _fetched(request.param)


@pytest.fixture(scope="session")
def newest():
    """(version, library) of the newest release."""
    return _fetched(_releases()[-1])
