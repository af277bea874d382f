"""Online autotuning of NCCL collectives for ZeRO and FSDP training.

`enable()`, `step_ended()` and `training_ended()` are all that a training script may call, and few scripts need to: the
first is done by `zerotune launch`, the second where a torch optimizer steps outside backward, the third at exit.
`zerotune.zero_runtime` is a public library of its own. All other names are private and may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["__version__", "enable", "step_ended", "training_ended"]


def enable(
    *,
    fabric: str | None = None,
    endpoint: str | None = None,
    communicator_variants: Sequence[Mapping[str, int]] = (),
) -> None:
    """Turn the agent on in this process; call it before `init_process_group`.

    Never raises: where tuning is impossible it logs one line and training runs as without us.

    Args:
        fabric: name or path of a fabric file: run the collectives on the emulated NCCL instead of
            the real one, as `launch --fabric` does. None: the real NCCL.
        endpoint: ZeroMQ endpoint of the daemon; None: `ZEROTUNE_ENDPOINT` or the default.
        communicator_variants: at most three dicts, such as `{"max_ctas": 8}`: the all-gathers of FSDP2 models also try
            process groups whose NCCL config has these values, and keep one where steps get shorter. All ranks say the
            same, before `fully_shard`.
    """
    import torch  # noqa: F401  (under `launch` the agent comes with it, which needs `activate` to be imported whole)

    from zerotune.agent.activate import activate

    activate(fabric=fabric, endpoint=endpoint)
    if communicator_variants:
        from zerotune.zero_runtime.autotune.fsdp2 import vary

        vary(communicator_variants)


def step_ended() -> None:
    """Say that a training step ends here, where no torch optimizer's `step()` does: settings may change here.

    All ranks must call it, at the same point of the program, outside backward. Where the agent is not on, or has seen
    this step end already, nothing happens.
    """
    from zerotune.agent import activate

    if activate.installed is not None:
        activate.installed.hooks.step_ended()


def training_ended() -> None:
    """Say that this process trains no more, where it is killed when its work is done, as Ray kills its workers.

    All ranks must call it, after their last step; settings no longer change. It waits for up to a second, for the last
    reports to be sent. A process that ends by itself need not call it. Where the agent is not on, nothing happens.
    """
    from zerotune.agent import activate

    activate.end()


def __getattr__(name: str) -> str:
    # Not at import: reading an installation's metadata takes longer than all else here.
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("zerotune")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
