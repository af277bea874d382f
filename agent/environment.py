"""Sets the NCCL variables that `zerotune launch --tune-environment` proposes, in all ranks or in none.

NCCL reads its variables once, when the first communicator is made. So they are set right before that, after all ranks
have agreed.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

import torch.distributed as dist

from ..store.errors import printable
from ..store.wire import Start
from .agreement.exchange import Exchange
from .agreement.job_environment import Agreed, agree
from .daemon_link.asking import announce
from .daemon_link.job_id import n_restarts
from .first_group import before_communicators
from .job_store import second_connection
from .machine.nccl_variables import in_effect
from .machine.tunable_variables import why_refused
from .settings import AgentSettings

logger = logging.getLogger("zerotune.agent")

PREFIX: Final = "zerotune-environment"


def tune_environment(settings: AgentSettings) -> None:
    """Have all ranks agree on the proposal once the job's store exists. To be called before a group is made."""
    before_communicators(lambda store, rank, world_size: _agree(settings, store, rank, world_size))


def assignments(variables: str) -> dict[str, str]:
    """Values by name, of `NAME=VALUE` separated by spaces."""
    return dict(part.split("=", 1) for part in variables.split() if "=" in part)


def objection(variables: str) -> str:
    """Why this rank cannot set these variables; empty: it can."""
    if variables and n_restarts():
        return "the job was restarted: it goes on with what was there before"
    taken = in_effect(os.environ)
    for name, value in assignments(variables).items():
        if why := why_refused(name):  # other processes can write to the job's store, too
            return f"{printable(name)} is refused: {why}"
        if taken.get(name, value) != value:
            return f"{name}={taken[name]} is set by the user on {os.uname().nodename}"
    return ""


def _agree(settings: AgentSettings, store: Any, rank: int, world_size: int) -> None:
    def remember(number: int, variables: str) -> bool:
        n_times = max(number - 1, n_restarts())
        job_id = settings.job_id + (f".{n_times}" if n_times else "")
        return announce(settings.endpoint, Start(job_id, settings.job_name, settings.training, variables))

    exchange = Exchange(dist.PrefixStore(PREFIX, second_connection(store)))
    try:
        agreed = agree(exchange, rank, world_size, settings.proposed_environment, objection, remember)
    except RuntimeError as error:
        agreed = Agreed("", f"the job's store does not answer: {error}")
    os.environ.update(assignments(agreed.variables))
    if rank == 0 and settings.proposed_environment and not agreed.variables:
        logger.warning("zerotune: %s is not tried: %s", settings.proposed_environment, agreed.why_not)
