"""The part of zerotune that lives inside the training process: light, never raises, never blocks.

`enable()` and `step_ended()` are all that a script may call; few need to. Under `zerotune launch` the first is done
for it, and where a torch optimizer steps outside backward the second is, too.
"""

from __future__ import annotations


def enable(*, fabric: str | None = None, endpoint: str | None = None) -> None:
    """Turn the agent on in this process; call it before `init_process_group`.

    Args:
        fabric: name or path of a fabric file: run the collectives on the emulated NCCL instead of
            the real one, as `launch --fabric` does. None: the real NCCL.
        endpoint: ZeroMQ endpoint of the daemon; None: `ZEROTUNE_ENDPOINT` or the default.

    Never raises: where tuning is impossible it logs one line and training runs as without us.
    """
    from agent.activate import activate

    activate(fabric=fabric, endpoint=endpoint)


def step_ended() -> None:
    """Say that a training step ends here, where no torch optimizer's `step()` does: settings may change here.

    All ranks must call it, at the same point of the program, outside backward. Where the agent is not on, or has seen
    this step end already, nothing happens.
    """
    from agent import activate

    if activate.installed is not None:
        activate.installed.hooks.step_ended()
