"""Which steps are told: optimizer steps that exchange nothing are part of the next one that does."""

from __future__ import annotations

from zerotune.agent.nccl.library import MIXED_EPOCHS, NO_CALLS
from zerotune.agent.steps.clock import Reading, VirtualClock
from zerotune.agent.steps.step_timer import StepTimer
from zerotune.store.records import StepRecord


class Counter:
    """Stands for the plugin."""

    def __init__(self) -> None:
        self.ran_under = NO_CALLS
        self.step = 0
        self.observed: list[bool] = []
        self.captured: list[bool] = []

    def set_step(self, step: int) -> int:
        self.step, ran_under, self.ran_under = step, self.ran_under, NO_CALLS
        return ran_under

    def set_observing(self, on: bool) -> None:
        self.observed.append(on)

    def set_capturing(self, on: bool) -> None:
        self.captured.append(on)


class Job:
    """A timer whose clock says how many optimizer steps there were."""

    training_thread_only = True

    def __init__(self) -> None:
        self.told: list[StepRecord] = []
        self.counter = Counter()
        self.timer = StepTimer(self.counter, self.told.append)
        self.timer.clock = self
        self.n_steps = 0

    def note(self) -> Reading:
        return Reading(float(self.n_steps))

    def step(self, epoch: int = NO_CALLS) -> None:
        self.counter.ran_under = epoch
        self.n_steps += 1
        self.timer.finish()


def test_a_round_of_local_steps_is_one_step():
    job = Job()
    for _ in range(4):
        for _ in range(9):
            job.step()
        job.step(epoch=3)
    rounds = [one for one in job.told if one.is_whole]
    assert [one.duration_us for one in rounds] == [1.0, 10.0, 10.0, 10.0]
    assert [one.step for one in job.told] == list(range(1, len(job.told) + 1))
    assert {one.epoch for one in rounds} == {3}
    assert job.counter.step == job.timer.step


def test_steps_before_the_first_exchange_are_compared_with_none():
    job = Job()
    for _ in range(5):
        job.step()
    assert [one.is_whole for one in job.told] == [False] * 4


def test_a_step_in_which_plans_changed_is_compared_with_none():
    job = Job()
    for epoch in (0, 0, MIXED_EPOCHS + 2, 2):
        job.step(epoch)
    assert [(one.epoch, one.is_whole) for one in job.told] == [(0, True), (2, False), (2, True)]


def test_steps_that_are_replayed_graphs_are_steps_of_their_own():
    job = Job()
    job.step(epoch=0)
    job.timer.sees_all_calls = False
    for _ in range(3):
        job.step()
    assert [(one.duration_us, one.is_whole) for one in job.told] == [(1.0, True)] * 3


def test_a_step_whose_clock_went_back_or_was_replaced_has_no_time():
    job = Job()
    job.step(epoch=0)
    job.n_steps = -7
    job.step(epoch=0)
    job.step(epoch=0)
    assert [one.step for one in job.told] == [2]
    job.timer.clock = VirtualClock()
    job.step(epoch=0)
    job.timer.report_ended()
    assert [one.step for one in job.told] == [2]
