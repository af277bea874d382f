"""Shares that are no multiple of 16 bytes are named, with what they must be padded to."""

import logging

from hypothesis import given
from hypothesis import strategies as st

from zerotune.store import wire
from zerotune.store.misaligned import MIN_SHARE_BYTES, Misaligned, misaligned
from zerotune.store.records import Collective, Protocol

GATHER = Collective.all_gather
ODD_SHARE, FAST_SHARE = 1_000_002, 1_000_016


@given(st.integers(2, 4096), st.integers(MIN_SHARE_BYTES, 2**40), st.sampled_from(Collective))
def test_padded_sizes_are_the_least_that_are_fast(n_ranks, share, collective):
    found = misaligned([(collective, n_ranks, n_ranks * share, Protocol.simple)])
    is_slow = collective in (Collective.all_gather, Collective.reduce_scatter) and share % 16
    assert len(found) == bool(is_slow)
    for one in found:
        assert one.fast_share_bytes % 16 == 0
        assert 0 < one.fast_share_bytes - share < 16
        assert one.fast_bytes == n_ranks * one.fast_share_bytes
        assert misaligned([(collective, n_ranks, one.fast_bytes, Protocol.simple)]) == ()


def test_status_names_it_and_the_log_once(bench, records, caplog):
    bench.join_all()
    with caplog.at_level(logging.WARNING, logger="zerotune.service"):
        for sequence in (0, 10):
            for nbytes in (4 * ODD_SHARE, 4 * FAST_SHARE):
                block = records(n=10, sequence=sequence, message_bytes=nbytes, protocol=int(Protocol.simple))
                for rank in range(4):
                    bench.send(rank, wire.Observations("job", rank, len(block)), block)
    (one,) = bench.service.jobs()[0].misaligned
    assert one == Misaligned(4 * ODD_SHARE, 4, GATHER)
    assert [str(FAST_SHARE) in record.getMessage() for record in caplog.records] == [True]
