"""The model of the plugin, and the plugin: the same promises, commits, stages and phases on any sequence of calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_side import NO_PLAN, Side, own_plugin, row
from plugin_model import Communicator, PluginModel, Shape

from zerotune.agent.nccl.library import CYCLE_DTYPE
from zerotune.store.records import NextStage, Phase, Plan, PlanRow

SHAPE = Shape("w", (0, 1), 1)
SIZES = (1 << 20, 1 << 21, 1 << 22)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    return own_plugin(tmp_path_factory.mktemp("plugin"))


def versioned(epoch: int, n_stages: int) -> Plan:
    """Each stage asks for as many channels as its epoch says."""
    later = tuple(NextStage(n_steps=1, n_rows=1, rows=(channel_row(epoch + i),)) for i in range(1, n_stages))
    return Plan(epoch, (channel_row(epoch),), then=later)


def channel_row(epoch: int) -> PlanRow:
    return row(2, epoch % 60 + 1)


OPERATIONS = st.one_of(
    st.tuples(st.just("call"), st.integers(1, 5)),
    st.tuples(st.just("promise"), st.integers(0, 4)),
    st.tuples(st.just("commit"), st.integers(-1, 6), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.just("leave alone"), st.integers(-1, 4)),
    st.tuples(st.just("release")),
)


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=25))
def test_model_and_plugin_agree_on_promises_and_stages(plugin, operations) -> None:
    side = Side(plugin, 1, 2)
    here = Communicator(SHAPE, 0, 2, n_calls=0)
    model = PluginModel([here], lead=0)
    epoch = 1
    try:
        for name, *numbers in operations:
            if name == "call":
                for _ in range(numbers[0]):
                    if here.waits():
                        break
                    ran = here.turn()[1]
                    assert side.call() == (ran // 10 % 60 + 1 if ran else NO_PLAN)
            elif name == "promise":
                model.lead = numbers[0]
                assert plugin.promise(side.owner, numbers[0]) == model.promise(0, numbers[0])
            elif name == "release":
                plugin.release(side.owner)
                model.release(0)
            elif name == "leave alone":
                from_call = (here.promise or here.n_calls + 1) + numbers[0]
                assert plugin.leave_alone(side.owner, from_call) == model.leave_alone(0, from_call)
            else:
                ahead, n_stages, length = numbers
                plan = versioned(epoch, n_stages)
                first = (here.promise or here.n_calls + 1) + ahead
                from_calls = tuple(first + i * length for i in range(n_stages))
                for each in (plugin, model):
                    each.prepare(plan)
                assert plugin.commit(side.owner, from_calls) == model.commit(0, from_calls)
                plugin.prepare_end()
                epoch += n_stages
            if here.promise is not None and here.waits():
                assert int(plugin.communicators()["n_calls"][0]) == here.n_calls
        plugin.release(side.owner)
        model.release(0)
        for _ in range(30):
            ran = here.turn()[1]
            assert side.call() == (ran // 10 % 60 + 1 if ran else NO_PLAN)
    finally:
        plugin.release(side.owner)
        side.close()


def naive_phases(cycle: Sequence[tuple[int, Phase]], calls: Sequence[int]) -> list[Phase | None]:
    """On the cycle from the beginning; off it from a call that does not fit, until it was seen whole."""
    sizes = [size for size, _ in cycle]
    found: list[Phase | None] = []
    at, is_on, since = 0, True, 0
    for i, size in enumerate(calls):
        if is_on and size == sizes[at]:
            found.append(cycle[at][1])
            at = (at + 1) % len(cycle)
            continue
        found.append(None)
        if is_on:
            is_on, since = False, i - at  # what fitted may begin what is looked for
        seen = calls[since : i + 1]
        if len(seen) >= len(sizes) and list(seen[-len(sizes) :]) == sizes:
            at, is_on = 0, True
    return found


@settings(max_examples=80, deadline=None)
@given(
    cycle=st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from([Phase.forward_gather, Phase.backward_gather])),
                   min_size=1, max_size=6),
    data=st.data(),
)  # fmt: skip
def test_the_cycle_is_found_again_exactly_where_it_was_seen_whole(plugin, cycle, data) -> None:
    """Whatever comes between: pieces of the cycle, and calls that are not in it."""
    pieces = st.one_of(
        st.just([size for size, _ in cycle]), st.lists(st.sampled_from([*SIZES, 1 << 10]), min_size=1, max_size=4)
    )
    calls = [size for piece in data.draw(st.lists(pieces, max_size=10)) for size in piece]
    side = Side(plugin, 1, 2)
    try:
        plugin.prepare(Plan(1, (row(2, 3, Phase.forward_gather), row(2, 5, Phase.backward_gather))))
        assert plugin.promise(side.owner, 0) == 1
        packed = np.array([(size, 2, int(phase)) for size, phase in cycle], CYCLE_DTYPE).tobytes()
        assert plugin.commit(side.owner, (1,), packed)
        plugin.prepare_end()
        channels = {Phase.forward_gather: 3, Phase.backward_gather: 5, None: NO_PLAN}
        assert [side.call(size) for size in calls] == [channels[phase] for phase in naive_phases(cycle, calls)]
    finally:
        side.close()
