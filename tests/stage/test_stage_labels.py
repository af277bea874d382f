"""Labels claim no more than the recorded sequences show, and different training is told apart where it can be."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from store.records import Stage
from tuner.stage.anatomy import TINY_BYTES
from tuner.stage.dataset import SETTLED_STEP, Sequence, recorded
from tuner.stage.labels import Shown, Training, visible


@pytest.fixture(scope="module")
def recordings() -> list[Sequence]:
    return recorded()


def turned(codes: list[int]) -> tuple[int, ...]:
    """The same for all rotations of one cycle, and for several rounds of it."""
    n = len(codes)
    period = next(p for p in range(1, n + 1) if n % p == 0 and codes[p:] + codes[:p] == codes)
    cycle = codes[:period]
    return min(tuple(cycle[i:] + cycle[:i]) for i in range(period))


def test_recordings_with_the_same_sequence_have_the_same_label(recordings: list[Sequence]) -> None:
    by_sequence = defaultdict(list)
    for one in recordings:
        codes = one.codes()[one.step(SETTLED_STEP)].tolist()
        by_sequence[turned(codes)].append(one)
    shared = [group for group in by_sequence.values() if len({one.training for one in group}) > 1]
    assert len(shared) > 20, "there is nothing to compare"
    for group in shared:
        shown = {one.shown() for one in group}
        assert len(shown) <= 1, [(one.name, str(one.shown())) for one in group]


def test_what_is_called_zero1_or_2_was_recorded_from_both(recordings: list[Sequence]) -> None:
    seen = defaultdict(set)
    for one in recordings:
        if one.shown().stage is Stage.zero1_or_2:
            seen[turned(one.codes()[one.step(SETTLED_STEP)].tolist())].add(one.training.stage)
    assert any(stages == {Stage.zero1, Stage.zero2} for stages in seen.values())


def test_no_sync_is_recorded_as_what_no_accumulation_is(recordings: list[Sequence]) -> None:
    ddp = [one for one in recordings if one.group == "ddp" and not one.training.tensor_parallel]
    pairs = defaultdict(list)
    for one in ddp:
        pairs[turned(one.codes()[one.step(SETTLED_STEP)].tolist())].append(one)
    for group in pairs.values():
        assert {one.training.n_micro > 1 for one in group} == {False, True}
        assert {one.shown().accumulation for one in group} == {None}


def test_recordings_cover_what_is_claimed(recordings: list[Sequence]) -> None:
    groups = {one.group for one in recordings}
    assert groups == {"ddp", "zero_redundancy", "fsdp1", "fsdp2", "deepspeed", "ours", "none"}
    for one in recordings:
        assert len(one.step_starts) >= 5, one.name
        assert (np.diff(one.start_us) >= 0).all() or one.group == "zero_redundancy", one.name
        assert int(one.message_bytes.max()) > TINY_BYTES, one.name


E = pytest.param


@pytest.mark.parametrize(
    ("training", "shown"),
    [
        E(Training(Stage.ddp), Shown(Stage.ddp), id="ddp"),
        E(Training(Stage.ddp, 4, has_marker=True), Shown(Stage.ddp), id="no_sync"),
        E(Training(Stage.ddp, 4, sends_each=True, has_marker=True), Shown(Stage.ddp, True), id="each"),
        E(Training(Stage.ddp, 4, sends_each=True), Shown(Stage.ddp), id="each, unmarked"),
        E(Training(Stage.zero1), Shown(Stage.zero1_or_2), id="zero1"),
        E(Training(Stage.zero1, broadcasts=True), Shown(Stage.zero1), id="broadcasts"),
        E(Training(Stage.zero2, 1, True, True), Shown(Stage.zero1_or_2), id="zero2"),
        E(Training(Stage.zero2, 4, sends_each=True), Shown(Stage.zero2, True), id="zero2 each"),
        E(Training(Stage.zero3, 1, True, True), Shown(Stage.zero3), id="zero3 unmarked"),
        E(Training(Stage.zero3, 1, True, True, True), Shown(Stage.zero3, False), id="zero3 marked"),
        E(Training(Stage.zero3, 4, True, True), Shown(Stage.zero3), id="zero3 each, unmarked"),
        E(Training(Stage.zero3, 4, False, True), Shown(Stage.zero3, True), id="zero3 last only"),
    ],
)
def test_what_is_visible(training: Training, shown: Shown) -> None:
    assert visible(training) == shown
