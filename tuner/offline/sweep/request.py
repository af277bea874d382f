"""A sweep's options, and whether this machine can run them."""

from __future__ import annotations

from typing import Final

import msgspec
import psutil

from ....agent.nccl import catalog, compiled
from ....agent.nccl import fabric as fabrics
from ....store.errors import PluginError, UserError
from ....store.records import Candidate, Collective
from .strategy import BUDGET, LOOK_REPEATS

SWEEPABLE: Final = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce, Collective.broadcast)
MAX_STARTS: Final = 20
"""If this many settings hang or fail, the cause is not the settings."""
MAX_BYTES: Final = 1 << 40
MAX_TIMEOUT_S: Final = 86_400.0


class SweepRequest(msgspec.Struct, frozen=True):
    """The sweep's options. `precision` is the wanted half width of each median's 95 % interval, as a share."""

    fabric: str | None = None
    n_ranks: int = 2
    collectives: tuple[str, ...] = ("all_gather", "reduce_scatter")
    min_bytes: int = 4096
    max_bytes: int = 64 * 2**20
    full: bool = False
    precision: float = 0.03
    max_repeats: int = 30
    timeout_s: float = 30.0
    """A visit that takes longer counts as hung."""
    budget: float = BUDGET
    """Samples that an active sweep may take, as a share of the full grid's."""
    check: bool = True
    """Whether to verify the result of one collective per setting and size."""
    fresh: bool = False
    """Whether to measure earlier sweeps' points again, and retry settings that broke then."""
    chunk_sizes: tuple[int, ...] = ()
    """Chunk sizes in bytes to try besides NCCL's own."""


def check(request: SweepRequest) -> tuple[Collective, ...]:
    """The requested collectives; UserError if this machine cannot run the request."""
    found = [catalog.find_collective(name) for name in request.collectives]
    collectives = tuple(one for one in found if one in SWEEPABLE)
    if len(collectives) < len(found):
        wrong = next(name for name, one in zip(request.collectives, found, strict=True) if one not in SWEEPABLE)
        raise UserError(f"{wrong[:80]!r} cannot be swept", f"use one of {', '.join(one.name for one in SWEEPABLE)}")
    for option, nbytes in (("--min-bytes", request.min_bytes), ("--max-bytes", request.max_bytes)):
        if nbytes < 1:
            raise UserError(f"messages of {nbytes:,} bytes are too small", f"use {option} 1 or more")
        if nbytes > MAX_BYTES:
            raise UserError(f"messages of {nbytes:,} bytes cannot be sent", f"use {option} {MAX_BYTES} or less")
    if request.min_bytes > request.max_bytes:
        problem = f"sizes {request.min_bytes:,} to {request.max_bytes:,} are no range"
        raise UserError(problem, "give a smaller --min-bytes or a larger --max-bytes")
    shares = (("--half-width", request.precision, 0.03), ("--samples-share", request.budget, 0.15))
    for name, value, example in shares:
        if not 0 < value <= 1:
            raise UserError(f"{name} {value:g} is no share", f"give a number above 0 and up to 1, such as {example}")
    _check_chunk_sizes(request)
    if request.max_repeats < LOOK_REPEATS:
        raise UserError(f"{request.max_repeats} repeats measure nothing", f"use --max-repeats {LOOK_REPEATS} or more")
    if not 0 < request.timeout_s <= MAX_TIMEOUT_S:
        problem = f"a timeout of {request.timeout_s:g} s makes no sense"
        raise UserError(problem, f"use a --timeout above 0 and up to {MAX_TIMEOUT_S:,.0f} s")
    if request.n_ranks < 2:
        problem = "1 rank has nobody to talk to" if request.n_ranks == 1 else f"{request.n_ranks} ranks are none"
        raise UserError(problem, "use --ranks 2 or more")
    if request.fabric is not None:
        most = fabrics.load(request.fabric).max_ranks
        if request.n_ranks > most:
            problem = f"fabric {request.fabric} has {most} ranks, not {request.n_ranks}"
            raise UserError(problem, f"use --ranks {most} or less")
        try:
            compiled.EMULATED_NCCL.build()
        except PluginError as error:
            raise UserError(str(error), "the emulated NCCL cannot run without it") from error
        # Every rank holds the whole message at least once, and all ranks share this machine's memory.
        _check_fits(request.max_bytes, psutil.virtual_memory().total // request.n_ranks, "of this machine's memory")
        return collectives
    from torch import cuda

    if cuda.device_count() < request.n_ranks:
        n_gpus = cuda.device_count()
        problem = f"this machine has {n_gpus} GPUs for {request.n_ranks} ranks"
        emulated = "--fabric NAME for the emulated NCCL"
        raise UserError(problem, f"use --ranks {n_gpus}, or {emulated}" if n_gpus > 1 else f"use {emulated}")
    _check_fits(request.max_bytes, cuda.get_device_properties(0).total_memory, "of the GPU's memory")
    return collectives


def _check_chunk_sizes(request: SweepRequest) -> None:
    if not request.chunk_sizes:
        return
    for chunk_bytes in request.chunk_sizes:
        try:
            Candidate(chunk_bytes=chunk_bytes)
        except ValueError as error:
            raise UserError(str(error), "use --chunk-bytes 64KiB, say") from error
    if not request.full:
        problem = "without --full a sweep guesses from settings that were measured, and nothing is known of chunk sizes"
        raise UserError(problem, "add --full to --chunk-bytes")
    if request.fabric is not None and not fabrics.load(request.fabric).chunks:
        problem = f"fabric {request.fabric} does not say what chunk sizes change"
        raise UserError(problem, "leave --chunk-bytes or --fabric out, or add `chunks` to the fabric's file")


def _check_fits(max_bytes: int, most_bytes: int, what: str) -> None:
    if max_bytes > most_bytes:
        problem = f"a message of {max_bytes:,} bytes does not fit into what a rank can have {what}: {most_bytes:,}"
        raise UserError(problem, "give a smaller --max-bytes")
