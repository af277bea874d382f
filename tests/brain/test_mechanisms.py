"""What the ablation takes out is there: a name that is gone would be judged as if it brought nothing."""

from __future__ import annotations

import pytest

from benchmarks.policy.mechanisms import MECHANISMS, without


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_can_be_taken_out_and_is_back_afterwards(name: str) -> None:
    owners = [(owner, attribute) for owner, attribute, _ in MECHANISMS[name] if not isinstance(owner, str)]
    before = [getattr(owner, attribute) for owner, attribute in owners]
    with without(name):
        assert [getattr(owner, attribute) for owner, attribute in owners] != before or not owners
    assert [getattr(owner, attribute) for owner, attribute in owners] == before
