"""Steps are timed by the device, however far the host runs ahead: with their own plans, and without ever waiting."""

from __future__ import annotations

import pytest

from benchmarks.lib.simulated.device import Device
from zerotune.agent.steps.clock import MAX_UNDERWAY, EventClock, WallClock, device_clock
from zerotune.agent.steps.step_timer import StepTimer
from zerotune.store.records import StepRecord

N_STEPS = 40


class Counter:
    """Stands for the plugin; each step has a plan of its own."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_step(self, step: int) -> int:
        return self.epoch

    def set_observing(self, on: bool) -> None:
        raise AssertionError(on)

    def set_capturing(self, on: bool) -> None:
        raise AssertionError(on)


class Job:
    """A host that enqueues steps on a device."""

    def __init__(self) -> None:
        self.device, self.counter = Device(), Counter()
        self.told: list[StepRecord] = []
        self.n_lost = 0
        self.timer = StepTimer(self.counter, self.told.append, on_lost=self.lose)
        self.timer.clock = EventClock(self.device)

    def lose(self) -> None:
        self.n_lost += 1

    def step(self, number: int, host_ahead: int) -> None:
        self.counter.epoch = 1 + number
        self.device.enqueue(work_us(number))
        self.device.run(host_ahead)
        self.timer.finish()


def work_us(number: int) -> float:
    """Of the step that is enqueued as the nth; no two are alike."""
    return 1000.0 + number**2


@pytest.mark.parametrize("host_ahead", range(5))
def test_each_step_has_its_own_time_and_plan_at_every_lag(host_ahead: int) -> None:
    job = Job()
    for number in range(N_STEPS):
        job.step(number, host_ahead)
        assert len(job.told) == max(0, number - host_ahead)
    job.device.run()
    job.timer.report_ended(is_last=True)
    assert [(one.step, one.epoch) for one in job.told] == [(number, 1 + number) for number in range(1, N_STEPS)]
    assert [one.duration_us for one in job.told] == pytest.approx([work_us(number) for number in range(1, N_STEPS)])
    assert job.n_lost == 0


@pytest.mark.parametrize(("uses_cuda", "clock_of"), [(True, EventClock), (False, WallClock)])
def test_a_process_that_uses_cuda_is_timed_by_its_events(uses_cuda: bool, clock_of: type, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: uses_cuda)
    assert type(device_clock()) is clock_of


def test_steps_that_have_not_run_at_the_end_are_counted_and_nobody_waits_for_them() -> None:
    job = Job()
    for number in range(10):
        job.step(number, 3)
    job.timer.report_ended(is_last=True)
    assert [one.step for one in job.told] == list(range(1, 7))
    assert job.n_lost == 3


def test_no_events_are_made_in_steady_state() -> None:
    job = Job()
    job.step(0, 4)
    n_made = job.device.n_made
    for number in range(1, 5 * MAX_UNDERWAY):
        job.step(number, 4)
    assert job.device.n_made == n_made
    assert job.n_lost == 0


def test_each_device_has_its_own_events_and_no_step_spans_two() -> None:
    job = Job()
    for number in range(6):
        job.device.index = number // 3
        job.step(number, 0)
    assert [one.step for one in job.told] == [1, 2, 4, 5]
    assert job.n_lost == 1


def test_nothing_is_asked_of_the_device_while_a_graph_is_captured() -> None:
    job = Job()
    for number in range(9):
        job.device.is_capturing = number == 4
        job.step(number, 1)
    assert job.device.n_touched_in_capture == 0
    assert [one.step for one in job.told] == [1, 2, 3, 6, 7]
    assert job.n_lost == 2, "the one that ended in it, and the one that began there"


def test_a_device_that_never_gets_on_is_not_waited_for_and_takes_no_memory() -> None:
    job = Job()
    for number in range(4 * MAX_UNDERWAY):
        job.step(number, 10 * MAX_UNDERWAY)
    assert not job.told
    job.device.run()
    job.timer.report_ended(is_last=True)
    assert [one.step for one in job.told] == list(range(1, MAX_UNDERWAY))
    assert len(job.told) + job.n_lost == 4 * MAX_UNDERWAY - 1
    for number in range(4 * MAX_UNDERWAY, 4 * MAX_UNDERWAY + 9):
        job.step(number, 0)
    assert job.told[-1].duration_us == pytest.approx(work_us(4 * MAX_UNDERWAY + 8))


def test_a_device_that_fails_raises_nothing_here() -> None:
    job = Job()
    for number in range(20):
        job.device.has_failed = number >= 10
        job.step(number, 2)
    job.timer.report_ended(is_last=True)
    assert len(job.told) + job.n_lost == 19


def test_a_step_that_began_by_another_clock_has_no_time() -> None:
    job = Job()
    job.timer.clock = WallClock()
    job.timer.finish()
    job.timer.finish()
    job.timer.clock = EventClock(job.device)
    job.timer.report_from_other_thread()  # another thread's, which leaves events to the one that trains
    for number in range(3):
        job.step(number, 0)
    assert [one.step for one in job.told] == [1, 3, 4]
    assert job.n_lost == 1
