"""Installs the agent in this process; nothing runs until the job's process group exists."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..store.errors import PluginError
from ..store.paths import check_endpoint
from .daemon_link.node_service import request_daemon
from .first_group import before_first_group
from .reasons import Mark, write_mark
from .settings import ENV_FABRIC, ENV_LAUNCH, AgentSettings, is_first_of_node, unpack_variables

if TYPE_CHECKING:
    from .session import Session
    from .steps.hooks import StepHooks

logger = logging.getLogger("zerotune.agent")


@dataclass(frozen=True)
class Installed:
    """The agent's parts in this process, for benchmarks and callbacks."""

    session: Session
    hooks: StepHooks
    start_s: float
    """Wall time that activation took."""


installed: Installed | None = None
_active = False


def arm() -> None:
    """Turn the agent on in a launched process that has imported torch.

    A child of multiprocessing gets the agent when it makes a process group, as ranks of `mp.spawn` do. A data loader's
    worker makes no group.
    """
    unpack_variables(os.environ)
    write_mark(Mark.agent)
    if not any("multiprocessing" in word for word in sys.orig_argv):  # the command line of spawned children names it
        activate()
        return
    if os.environ.get(ENV_FABRIC):
        from .emulation import install

        install()
    before_first_group(activate)


def activate(fabric: str | None = None, endpoint: str | None = None) -> None:
    """Turn the agent on once; see `zerotune.enable`. Never raises."""
    global _active
    if _active:
        return
    _active = True
    try:
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            logger.warning("zerotune: the agent was enabled after init_process_group: earlier groups may not be tuned")
        _activate(fabric, endpoint)
    except Exception as error:
        logger.warning("zerotune: the agent is off, training runs untuned: %s", error)


def _activate(fabric: str | None, endpoint: str | None) -> None:
    global installed
    began_s = time.perf_counter()
    if endpoint is None:
        request_daemon(wait_s=0.0)
    settings = AgentSettings.from_environment()
    if endpoint is not None:
        settings = replace(settings, endpoint=endpoint)
    check_endpoint(settings.endpoint)
    if fabric is not None:
        from .nccl import fabric as fabrics
        from .nccl.compiled import EMULATED_NCCL

        # A wrong name or a missing compiler must fail now, as under `launch`, not when groups are made.
        fabrics.load(fabric)
        EMULATED_NCCL.build()
        settings = replace(settings, fabric=fabric)
        os.environ[ENV_FABRIC] = fabric
    if settings.fabric is not None:
        from .emulation import install

        install()
    if not settings.agent_on and settings.summary_path is None:
        return

    from .session import Session
    from .steps.hooks import StepHooks

    plugin = None
    if settings.agent_on:
        from .nccl import library, other_plugins

        try:
            plugin = library.load()
        except PluginError as error:
            # One warning is enough: `launch` has printed it, or the node's first rank does.
            is_printed = os.environ.get(ENV_LAUNCH) == "1" or not is_first_of_node()
            level = logging.INFO if is_printed else logging.WARNING
            logger.log(level, "zerotune: %s; training runs at NCCL's own choice", error)
            other_plugins.restore_variables(os.environ)
        else:
            if settings.plan_path is not None:
                from ..store.plan_file import names_chunk_sizes

                plugin.ask_chunk_sizes(names_chunk_sizes(settings.plan_path))
            elif settings.job_options.chunk_sizes:
                plugin.ask_chunk_sizes(True)
            # Not sooner: a process without a group must pass its environment on unchanged. The plugin is loaded
            # already, so its name is enough; NCCL 2.27.3 accepts no path.
            name, searches = plugin.path.name, settings.fabric is None
            before_first_group(lambda: other_plugins.set_variables(os.environ, name, searches=searches))
            if settings.training:
                from .environment import tune_environment

                tune_environment(settings)
    session = Session(settings, plugin)
    hooks = StepHooks(session.on_region, session.on_boundary, session.on_replay, session.on_capture)
    hooks.install()
    atexit.register(session.close)

    # A forked child (a data loader's worker) has none of the agent's threads: it must not act for the rank.
    def disable_in_child() -> None:
        global installed
        installed = None
        hooks.remove()
        atexit.unregister(session.close)

    os.register_at_fork(after_in_child=disable_in_child)
    installed = Installed(session, hooks, time.perf_counter() - began_s)


def end() -> None:
    """Shut the agent down now instead of at exit. Never raises; the agent cannot be enabled again in this process."""
    global installed
    if installed is None:
        return
    ending, installed = installed, None
    atexit.unregister(ending.session.close)
    ending.hooks.remove()
    ending.session.close()
