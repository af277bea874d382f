"""The agreement counters of one rank, and the faults that are injected into it."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import asdict
from typing import Any, Final

import torch.distributed as dist

from zerotune.agent import activate, membership
from zerotune.agent.agreement.members import Members
from zerotune.agent.agreement.protocol import Member, PlanChange
from zerotune.agent.job_store import open_job_store

FAULT: Final = "BENCHMARK_FAULT"
"""Environment variable: the fault of the agreement."""
PAUSED: Final = "paused"
"""The agreement's thread stops for PAUSE_S at its first change, before it promises anything."""
PROMISED: Final = "promised"
"""The thread stops when it has promised."""
PAUSE_S: Final = 5
FAILING: Final = "failing"
"""A request to the job's store fails, once."""
FAILING_REQUEST: Final = 2


def befall() -> None:
    """Inject the fault that the environment names; to be called before the agent joins a job."""
    if os.environ.get(FAULT) in (PAUSED, PROMISED):
        _pause_at_first_change(has_promised=os.environ[FAULT] == PROMISED)
    elif os.environ.get(FAULT) == FAILING:
        _fail_one_request()


def _pause_at_first_change(*, has_promised: bool) -> None:
    answer, pauses_s = Members.answer, itertools.chain([PAUSE_S], itertools.repeat(0))

    def paused(members: Members, change: PlanChange) -> tuple[Member, ...]:
        if not has_promised:
            time.sleep(next(pauses_s))
        answered = answer(members, change)
        if has_promised and any(member.promise for member in answered):
            time.sleep(next(pauses_s))
        return answered

    setattr(Members, "answer", paused)  # noqa: B010 - for this process alone


def _fail_one_request() -> None:
    numbers = itertools.count(1)

    class Store(dist.PrefixStore):
        def compare_set(self, *args: Any) -> Any:
            if next(numbers) == FAILING_REQUEST:
                raise RuntimeError("a fault that was asked for")
            return super().compare_set(*args)

    setattr(membership, "open_job_store", lambda store: Store("", open_job_store(store)))  # noqa: B010 - as above


def counters() -> dict[str, Any] | None:
    installed = activate.installed
    tell = getattr(installed.session, "agreement_counters", None) if installed is not None else None
    told = tell() if tell is not None else None
    return None if told is None else asdict(told)
