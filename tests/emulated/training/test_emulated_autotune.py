"""Chunks that go out together are one launch, and change no bit of a sum."""

from __future__ import annotations

from typing import Any

import pytest
from emulated_world import World, subgroup

from benchmarks.runtime.autotuned_training import both


def _trained(_rank: int, n_ranks: int, stage: int) -> Any:
    group = subgroup(n_ranks)
    return None if group is None else both(group, stage, 0.1)


@pytest.mark.parametrize(("n_ranks", "stage"), [(4, 1), (2, 2), (4, 3)])
def test_no_bit_changes_with_bucket_and_depth(model_world: World, n_ranks: int, stage: int) -> None:
    answers = [answer for answer in model_world.run(_trained, n_ranks, stage) if answer is not None]
    assert all(same for same, _ in answers)
    assert all(ran == answers[0][1] for _, ran in answers)
    assert len(set(answers[0][1])) > 1
