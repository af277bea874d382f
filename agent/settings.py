"""The agent's environment variables; `zerotune launch` writes them, each rank reads them once."""

from __future__ import annotations

import os
import urllib.parse
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from ..store.job_options import MOST_STEPS, NO_OPTIONS, JobOptions
from ..store.paths import default_endpoint
from ..store.records.job_names import is_job_name
from .machine.launchers import local_rank

ENV_LAUNCH = "ZEROTUNE_LAUNCH"
"""Set to 1 by `launch`: the bootstrap activates the agent in every rank."""
ENV_AGENT = "ZEROTUNE_AGENT"
"""0 leaves the agent out (the emulated NCCL and the summary still work)."""
ENV_ENDPOINT = "ZEROTUNE_ENDPOINT"
ENV_FABRIC = "ZEROTUNE_FABRIC"
ENV_JOB_ID = "ZEROTUNE_JOB_ID"
ENV_JOB_NAME = "ZEROTUNE_JOB_NAME"
ENV_TRACE_DIR = "ZEROTUNE_TRACE_DIR"
ENV_SUMMARY = "ZEROTUNE_SUMMARY"
ENV_PLAN = "ZEROTUNE_PLAN"
ENV_NUMERICS = "ZEROTUNE_NUMERICS"
"""`exact`: only settings that cannot change a bit of the results are tuned."""
EXACT = "exact"
ENV_TRAINING = "ZEROTUNE_TRAINING"
"""Identifies starts of the same training; set if `launch` tunes the environment."""
ENV_PROPOSED = "ZEROTUNE_PROPOSED_ENVIRONMENT"
"""Rank 0's proposal for the NCCL variables of all ranks: `NAME=VALUE` separated by spaces."""
ENV_SHADOW = "ZEROTUNE_SHADOW"
ENV_TUNE_FOR = "ZEROTUNE_TUNE_FOR"
ENV_COMPARE = "ZEROTUNE_COMPARE"
ENV_OWN_STEPS = "ZEROTUNE_OWN_STEPS"
ENV_CHUNK_SIZES = "ZEROTUNE_CHUNK_SIZES"
"""1: NCCL asks the tuner for chunk sizes, on all ranks alike."""
ENV_TICK_MS = "ZEROTUNE_TICK_MS"
ENV_CURVE_KEYS = "ZEROTUNE_CURVE_KEYS"
"""Folder with the keys for a daemon at tcp://."""
ENV_ALL = "NCCL_ZEROTUNE"
"""All of these in one variable: some launchers pass on to ranks only variables that begin with NCCL."""

_PREFIX = "ZEROTUNE_"
DEFAULT_TICK_MS = 250
"""Milliseconds between reports while the daemon is learning."""


@dataclass(frozen=True)
class AgentSettings:
    """Settings of one training process."""

    endpoint: str
    job_id: str
    agent_on: bool = True
    fabric: str | None = None
    trace_dir: Path | None = None
    summary_path: Path | None = None
    plan_path: Path | None = None
    tick_ms: int = DEFAULT_TICK_MS
    job_name: str = ""
    is_exact: bool = False
    """Only collectives that compute nothing are tuned."""
    job_options: JobOptions = NO_OPTIONS
    training: str = ""
    """Empty: the environment is not tuned."""
    proposed_environment: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> AgentSettings:
        """Read `ZEROTUNE_*`; a variable that is absent or malformed takes its default."""
        env = os.environ if environment is None else environment
        name = env.get(ENV_JOB_NAME, "")
        return cls(
            endpoint=env.get(ENV_ENDPOINT) or default_endpoint(),
            job_id=env.get(ENV_JOB_ID) or new_job_id(),
            agent_on=env.get(ENV_AGENT, "1") != "0",
            fabric=env.get(ENV_FABRIC) or None,
            trace_dir=_path(env, ENV_TRACE_DIR),
            summary_path=_path(env, ENV_SUMMARY),
            plan_path=_path(env, ENV_PLAN),
            tick_ms=tick_of(env.get(ENV_TICK_MS, "")) or DEFAULT_TICK_MS,
            job_name=name if is_job_name(name) else "",
            is_exact=env.get(ENV_NUMERICS) == EXACT,
            training=env.get(ENV_TRAINING, ""),
            proposed_environment=env.get(ENV_PROPOSED, ""),
            job_options=JobOptions(
                shadow=env.get(ENV_SHADOW) == "1",
                tune_steps=_steps(env.get(ENV_TUNE_FOR, "")),
                compare_steps=_steps(env.get(ENV_COMPARE, "")),
                own_steps=_steps(env.get(ENV_OWN_STEPS, "")),
                chunk_sizes=env.get(ENV_CHUNK_SIZES) == "1",
            ),
        )


def pack_variables(environment: MutableMapping[str, str]) -> None:
    """Write all of zerotune's variables into `ENV_ALL`, with characters that no shell changes."""
    found = sorted((name, value) for name, value in environment.items() if name.startswith(_PREFIX))
    environment[ENV_ALL] = ",".join(f"{name}={urllib.parse.quote(os.fsencode(value))}" for name, value in found)


def unpack_variables(environment: MutableMapping[str, str]) -> None:
    """Restore variables from `ENV_ALL`; those that are set already stay."""
    for part in environment.get(ENV_ALL, "").split(","):
        name, _, value = part.partition("=")
        if name.startswith(_PREFIX):
            environment.setdefault(name, os.fsdecode(urllib.parse.unquote_to_bytes(value)))


def tick_of(text: str) -> int | None:
    """Milliseconds of `ZEROTUNE_TICK_MS`; None: it is not a whole number above 0."""
    return int(text) or None if text.isascii() and text.isdigit() else None


def new_job_id() -> str:
    """An id that no other job has. A process id would not do: containers reuse them."""
    return f"job-{uuid.uuid4().hex[:8]}"


def is_first_of_node() -> bool:
    """Whether this rank prints the messages that a user should read only once per node."""
    return local_rank(os.environ) == 0


def _steps(text: str) -> int:
    return min(int(text), MOST_STEPS) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _path(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name)
    return Path(value) if value else None
