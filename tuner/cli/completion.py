"""Shell completion for values of options; it never fails: values that cannot be read are not offered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import typer

from ...store.errors import ZerotuneError

COLLECTIVES = (
    "all_gather, reduce_scatter, all_reduce, broadcast, reduce, all_to_all, send_recv, send, recv, gather, scatter"
)
GPUS = (
    "v100_16gb, v100_32gb, a100_40gb, a100_80gb, a800_80gb, l40s_48gb, h100_80gb, h100_96gb, h200_141gb, b200_180gb"
)
"""Values as help lists them, so that their modules need not be imported."""
Completion = Callable[[typer.Context, str], list[str]]


def of(values: Callable[[typer.Context], Iterable[str]]) -> Completion:
    """A typer completion that offers `values` with the typed beginning."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with contextlib.suppress(ZerotuneError, OSError):
            return [value for value in values(ctx) if value.startswith(incomplete)]
        return []

    return complete


def one_of(*values: str) -> Completion:
    """A completion from a fixed list of words."""
    return of(lambda ctx: values)


def _fabrics(ctx: typer.Context) -> Iterable[str]:
    from ...agent.nccl import fabric

    return [*fabric.names(), *fabric.user_names()]


def _user_fabrics(ctx: typer.Context) -> Iterable[str]:
    from ...agent.nccl import fabric

    return fabric.user_names()


def _machines(ctx: typer.Context) -> Iterable[str]:
    from ...agent.nccl import fabric
    from ...agent.nccl.twin.machines import MACHINES

    return [*MACHINES, *fabric.user_names()]


def _collectives(ctx: typer.Context) -> Iterable[str]:
    from ...store.records import Collective

    return Collective.__members__


def _swept(ctx: typer.Context) -> Iterable[str]:
    from ..offline.sweep.request import SWEEPABLE

    return [one.name for one in SWEEPABLE]


def _phases(ctx: typer.Context) -> Iterable[str]:
    from ...store.records import Phase

    return Phase.__members__


def _formats(ctx: typer.Context) -> Iterable[str]:
    from ..traces.formats import FORMATS

    return [one.name for one in FORMATS]


def _optimizers(ctx: typer.Context) -> Iterable[str]:
    from ..offline.memory_report import OPTIMIZERS

    return OPTIMIZERS


def _precisions(ctx: typer.Context) -> Iterable[str]:
    from ..offline.memory_report import PRECISIONS

    return PRECISIONS


def _gpus(ctx: typer.Context) -> Iterable[str]:
    from ..advice.hardware.gpus import GPUS

    return GPUS


def _policies(ctx: typer.Context) -> Iterable[str]:
    from ..offline.replay.policies import POLICIES

    return POLICIES


def _jobs(ctx: typer.Context) -> Iterable[str]:
    from ...store.sqlite.database import Store
    from .paths import store_path

    with Store.open(store_path(ctx.params.get("store")), read_only=True) as store:
        newest_first = store.jobs()[::-1]
        return [*(job.job_id for job in newest_first), *dict.fromkeys(job.name for job in newest_first if job.name)]


def _fabric_ids(ctx: typer.Context) -> Iterable[str]:
    from ...store.sqlite.database import Store
    from .paths import store_path

    with Store.open(store_path(ctx.params.get("store")), read_only=True) as store:
        return list(store.fabrics())


fabrics, collectives, swept = of(_fabrics), of(_collectives), of(_swept)
described = of(lambda ctx: dict.fromkeys([*_machines(ctx), *_fabrics(ctx)]))
machines, user_fabrics = of(_machines), of(_user_fabrics)
phases, formats = of(_phases), of(_formats)
optimizers, precisions, policies, gpus = of(_optimizers), of(_precisions), of(_policies), of(_gpus)
jobs, fabric_ids = of(_jobs), of(_fabric_ids)
