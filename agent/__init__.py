"""The part of zerotune that lives inside the training process: light, never raises, never blocks.

`enable()` is all a script may call; under `zerotune launch` even that is done for it.
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
