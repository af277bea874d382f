"""The judge of step times finds what the host's clock puts under the wrong plan, and nothing wrong with events."""

from __future__ import annotations

import pytest

from benchmarks.agent.first_contact import told_steps


@pytest.mark.parametrize("host_ahead", [0, 1, 3])
def test_steps_are_misattributed_by_the_host_alone(host_ahead: int) -> None:
    off, n_wrong, n_lost = told_steps(host_ahead, has_events=True)
    assert off.max() < 0.001
    assert (n_wrong, n_lost) == (0, 0)
    _, n_by_host, _ = told_steps(host_ahead, has_events=False)
    assert n_by_host > 1000 if host_ahead else n_by_host == 0
