from __future__ import annotations

from zerotune.tuner.service.observation_windows import BUSY_STEPS, QUIET_PERIOD_STEPS, WINDOW_STEPS, ObservationWindows


def observed(windows: ObservationWindows, steps: range) -> list[int]:
    """Steps that a rank which obeys would observe."""
    until, seen = 0, []
    for step in steps:
        if n_steps := windows.due(step):
            until = step + n_steps
        if step < until:
            seen.append(step)
    return seen


def test_a_busy_job_is_observed_without_gaps():
    assert observed(ObservationWindows(), range(BUSY_STEPS)) == list(range(BUSY_STEPS))


def test_a_quiet_job_is_sampled():
    windows = ObservationWindows()
    observed(windows, range(BUSY_STEPS))
    quiet = range(BUSY_STEPS, BUSY_STEPS + 10 * QUIET_PERIOD_STEPS)
    share = len(observed(windows, quiet)) / len(quiet)
    assert 0.5 * WINDOW_STEPS / QUIET_PERIOD_STEPS < share < 1.5 * WINDOW_STEPS / QUIET_PERIOD_STEPS


def test_a_new_plan_is_watched_at_once():
    windows = ObservationWindows()
    observed(windows, range(1000))
    windows.plan_offered(1000)
    assert observed(windows, range(1000, 1000 + BUSY_STEPS)) == list(range(1000, 1000 + BUSY_STEPS))


def test_a_latecomer_joins_the_open_window():
    windows = ObservationWindows()
    windows.due(0)
    assert windows.remaining(5) == WINDOW_STEPS - 5
    assert windows.remaining(500) == 0
