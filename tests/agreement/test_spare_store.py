"""Where rank 0's spare store listens, and who finds it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from zerotune.agent.agreement.spare_store import N_REACHED_KEY, connect_spare, open_spare

TIMEOUT = timedelta(seconds=60)


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)


def job_store(server: dist.TCPStore, host: str) -> dist.Store:
    return dist.PrefixStore("job", dist.TCPStore(host, server.port, None, False, TIMEOUT, wait_for_workers=False))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_it_is_found_by_whatever_name_the_jobs_store_has(server: dist.TCPStore, host: str) -> None:
    opened = open_spare(job_store(server, host), 2)
    assert opened is not None
    spare, address = opened
    reached = connect_spare(address)
    assert reached is not None
    assert spare.add(N_REACHED_KEY, 0) == 1
    spare.set("key", b"value")
    assert reached.get("key") == b"value"


def test_none_is_opened_where_connections_would_use_up_the_files(server: dist.TCPStore) -> None:
    assert open_spare(job_store(server, "127.0.0.1"), 1 << 40) is None


@pytest.mark.parametrize("address", ["", "7", "1 prefix 127.0.0.1"])
def test_what_cannot_be_reached_is_none(address: str) -> None:
    assert connect_spare(address) is None
