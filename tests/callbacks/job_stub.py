"""A process whose agent is on, as far as callbacks see it."""

from types import SimpleNamespace

from zerotune.agent.steps.recent_steps import RecentSteps
from zerotune.store.records import StepRecord


class SessionStub:
    """Steps and counters that a test sets."""

    def __init__(self, endpoint="ipc:///nowhere/daemon.sock"):
        self.job_id, self.endpoint = "job", endpoint
        self.recent_steps = RecentSteps(lambda epoch: epoch % 2 == 0)  # even ones are control windows
        self.n_calls = self.n_matched = 0

    def counters(self):
        return SimpleNamespace(n_calls=self.n_calls, n_matched=self.n_matched)

    def step(self, n_steps=1, *, epoch=0, us=1000.0, tuned=0):
        for _ in range(n_steps):
            last = self.recent_steps.last
            self.recent_steps.add(StepRecord(last.step + 1 if last else 1, epoch, us))
            self.n_calls += 10
            self.n_matched += tuned
