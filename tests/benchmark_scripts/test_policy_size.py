"""The ratchet on the policy's size."""

from __future__ import annotations

from benchmarks.policy.policy_size import LIMITS, REACHED, sizes


def test_the_policy_does_not_grow() -> None:
    size = sizes()
    for metric, limit in LIMITS.items():
        assert size[metric] <= max(REACHED[metric], limit), metric
