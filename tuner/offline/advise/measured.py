"""Measurements of a store or a trace that replace assumptions of the advice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....store.counted import counted
from ....store.errors import UserError
from ....store.foreign.regular_file import begin_of
from ....store.records import Collective, CommunicatorClass, Stage, StepRecord
from ....store.sqlite.database import Store
from ...advice.hardware.clusters import Cluster
from ...advice.hardware.gpus import usual
from ...advice.hardware.network import Network
from ...advice.prediction.memory import memory_of
from ...advice.prediction.step import step_parts
from ...advice.problem import Measured, Problem, ZeroConfiguration
from ...traces import Trace, read_trace
from ...traces.measuring import Portion, UserFacts
from ..jobs.finding import job_of

_DATABASE: Final = b"SQLite format 3\0"
_LEAST_BYTES: Final = 64 << 10
"""Smaller messages show latencies, which matter little for a step's communication."""
_MOST_OFF: Final = 100.0
"""A measured time that differs from the model's by this factor is of another machine or model."""
_RECENT_STEPS: Final = 200
"""Only this many of the newest steps count, as a job changes."""
_COLLECTIVES: Final = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)
_STAGES: Final = {
    Stage.ddp: (0,),
    Stage.zero1: (1, 2),
    Stage.zero2: (1, 2),
    Stage.zero1_or_2: (1, 2),
    Stage.zero3: (3,),
}
"""Stages that a job may have run, by its recognised stage; stages 1 and 2 may look alike."""
_RAN: Final = (
    "write it as stage=3,batch=2,recompute=full (also accumulation, model-parallel, hybrid, bucket-mb, prefetch)"
)


Facts = Mapping[str, str | int | float | bool]
"""A fabric's description by ranks."""


class Found(NamedTuple):
    """The problem with its measured values, and one sentence for each of them."""

    problem: Problem
    sentences: tuple[str, ...]


def parse_ran(text: str) -> ZeroConfiguration:
    """The measured job's configuration, from `stage=3,batch=2,recompute=full`; UserError if it is not of that form."""
    fields: dict[str, Any] = {"stage": 3, "micro_batch": 1}
    names = {
        "stage": "stage",
        "batch": "micro_batch",
        "accumulation": "accumulation",
        "model-parallel": "n_model_parallel",
        "hybrid": "shard_ranks",
        "prefetch": "prefetch",
        "bucket-mb": "bucket_bytes",
    }
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key == "recompute" and value in ("none", "half", "full"):
            fields[key] = value
        elif key in names and value.isdecimal() and len(value) < 10 and (int(value) or key in ("stage", "prefetch")):
            fields[names[key]] = int(value) << (20 if key == "bucket-mb" else 0)
        else:
            raise UserError(f"{part!r} does not say what ran", _RAN)
    if fields["stage"] > 3:
        raise UserError(f"stage {fields['stage']} does not exist", _RAN)
    if "shard_ranks" in fields and fields["stage"] != 3:
        raise UserError(f"stage {fields['stage']} and hybrid sharding are not compared here", "leave out hybrid")
    return ZeroConfiguration(**fields)


def measured(problem: Problem, path: Path, job: str | None, ran: ZeroConfiguration | None) -> Found:
    """Replace assumptions by measurements, and say so in one sentence for each.

    Collectives give the ratio of measured to modelled communication time. If `ran` is given, steps give that ratio for
    computation, and memory pressure gives the memory that the model does not know.

    Args:
        path: a store, a trace, or a folder of one.
        job: a job of the store; None: the newest that trained.
        ran: that job's configuration, on the same cluster and model.

    Raises:
        UserError: there is nothing to use.
    """
    if not path.exists():
        raise UserError(f"there is nothing at {path}", "name a store or a trace")
    if ran is not None:
        _check_ran(problem, ran)
    if is_store(path):
        with Store.open(path, read_only=True) as store:
            found = job_of(store, job)
            facts = store.fabrics().get(found.fabric_id, {})
            rows, steps = store.measurements(job_id=found.job_id, chunk_bytes=None), store.steps(found.job_id)
        origin = f"job {found.name or found.job_id}"
        if ran is not None and not steps:
            raise UserError(f"{origin} has no steps that --ran could be of", "leave it out, or name a job that trained")
        _check_gpus(problem.cluster, facts, origin)
        known = _applied(problem, [rows], steps, ran, origin)
        if ran is not None and ran.stage not in _STAGES.get(found.stage, (ran.stage,)):
            doubt = f"{origin} looks like {found.stage.name}, not like the stage {ran.stage} that --ran names"
            known = known._replace(sentences=(*known.sentences, doubt))
        return known
    if ran is not None:
        raise UserError(f"the trace {path.name} tells collectives and no steps", "leave out --ran, or name a store")
    origin = f"the trace {path.name}"
    return _applied(problem, _rows_of_trace(path, problem.cluster, job, origin), [], None, origin)


def of_rows(problem: Problem, rows: NDArray[np.void], facts: Facts, origin: str) -> Found:
    """Replace assumptions by collectives: `rows` of MEASUREMENT, shape (n,), on the fabric of `facts`.

    Raises:
        UserError: they have nothing to use, or are of another machine.
    """
    _check_gpus(problem.cluster, facts, origin)
    return _applied(problem, [rows], [], None, origin)


def _rows_of_trace(path: Path, cluster: Cluster, job: str | None, origin: str) -> Iterator[NDArray[np.void]]:
    """Rows of a trace; missing fields mean NCCL's own choice, and the number of nodes of the problem."""
    trace = read_trace(path)
    n_seen = 0
    for portion in _portions(trace, cluster.n_nodes):
        if portion.job_id is None:
            trace.refuse_job(job)
        if job in (None, portion.job_id):
            n_seen += 1
            _check_gpus(cluster, portion.fabric, origin)
            yield portion.rows
    if job is not None and not n_seen:
        raise UserError(f"no job {job!r} in {path}", "leave out --job")


def _portions(trace: Trace, n_nodes: int) -> Iterator[Portion]:
    try:
        yield from trace.portions(UserFacts(is_default=True, n_nodes=n_nodes))
    except UserError as error:
        raise UserError(error.problem, "ask with --nodes about the nodes that it ran on") from error


def _check_gpus(cluster: Cluster, facts: Facts, origin: str) -> None:
    """Refuse measurements on GPUs that are known to be of another generation than the cluster's."""
    found = facts.get("compute_capability")
    if isinstance(found, int) and usual(found).capability != cluster.gpu.capability:
        raise UserError(
            f"{origin} is of GPUs of compute capability {found / 10:.1f}, and {cluster.name} has"
            f" {cluster.gpu.capability / 10:.1f}",
            "name the machine that it was measured on with --fabric",
        )


def _check_ran(problem: Problem, ran: ZeroConfiguration) -> None:
    """Refuse a configuration that cannot run on the cluster."""
    n_gpus, n_heads, split = problem.cluster.n_gpus, problem.shape.n_heads, ran.n_model_parallel
    if n_gpus % split or n_heads % split:
        raise UserError(
            f"model parallelism of {split} does not divide {n_heads} heads and {n_gpus} GPUs",
            "say with --ran and --nodes what ran",
        )
    if ran.shard_ranks and problem.n_groups(ran) % ran.shard_ranks:
        raise UserError(
            f"hybrid sharding over {ran.shard_ranks} ranks does not divide {problem.n_groups(ran)}",
            "say with --ran and --nodes what ran",
        )


def is_store(path: Path) -> bool:
    """Whether a file begins like a store."""
    try:
        return begin_of(path, len(_DATABASE)) == _DATABASE
    except OSError:
        return False


def _applied(
    problem: Problem,
    rows: Iterable[NDArray[np.void]],
    steps: list[StepRecord],
    ran: ZeroConfiguration | None,
    origin: str,
) -> Found:
    sentences, compute = [], None
    factors = _network_factors(rows, problem.cluster.network)
    network, spread = None, 0.0
    if factors:
        network = math.exp(median(map(math.log, factors)))
        low, high = _nine_of_ten(factors)
        spread = math.log(high / low) / 2
        if not 1 / _MOST_OFF < network < _MOST_OFF:
            raise UserError(
                f"collectives of {origin} take {network:.3g} times what those of {problem.cluster.name} should",
                "name the machine that it was measured on with --fabric",
            )
        sentences.append(
            f"collectives take {network:.2f} times what the model says{_between((low, high))}, median of"
            f" {counted(len(factors), 'size')} in {origin}"
        )
    problem = msgspec.structs.replace(problem, measured=Measured(None, network, spread))
    settled = steps[-min(_RECENT_STEPS, -(-len(steps) // 2)) :] if steps else []
    if ran is not None and settled:
        compute = compute_factor(problem, ran, settled)
        busy_us = [_busy_us(step) for step in settled]
        each = [compute * one / median(busy_us) for one in busy_us]
        sentences.append(
            f"computation takes {compute:.2f} times what the model says{_between(_nine_of_ten(each))}, median of"
            f" {counted(len(settled), 'step')} of {origin}"
        )
        problem = msgspec.structs.replace(problem, measured=Measured(compute, network, spread))
        pressures = [step.memory_pressure for step in settled if step.memory_pressure is not None]
        if pressures:
            problem, sentence = _with_memory(problem, ran, max(pressures), origin)
            sentences.append(sentence)
    if not sentences:
        raise UserError(
            f"{origin} has no collective of {_LEAST_BYTES >> 10} KiB or more that can be compared",
            "name what was measured on this machine, or a job that trained, and say with --ran what it ran",
        )
    return Found(problem, tuple(sentences))


def _nine_of_ten(factors: list[float]) -> tuple[float, float]:
    """The range that nine of ten values lie in."""
    cuts = quantiles(factors, n=20, method="inclusive") if len(factors) > 1 else factors
    return cuts[0], cuts[-1]


def _between(bounds: tuple[float, float]) -> str:
    """A range in words; empty if both ends look the same."""
    low, high = (f"{one:.2f}" for one in bounds)
    return f" (nine of ten {low} to {high})" if low != high else ""


def _network_factors(rows: Iterable[NDArray[np.void]], network: Network) -> list[float]:
    """The median duration over the model's, of each size."""
    durations: dict[tuple[int, int, int, int], list[float]] = defaultdict(list)
    for block in rows:
        large = block[(block["message_bytes"] >= _LEAST_BYTES) & (block["duration_us"] > 0) & (block["n_ranks"] > 1)]
        for row in large:
            if row["collective"] in _COLLECTIVES and row["n_nodes"] > 0:
                key = int(row["collective"]), int(row["message_bytes"]), int(row["n_ranks"]), int(row["n_nodes"])
                durations[key].append(float(row["duration_us"]))
    factors = []
    for (collective, size, n_ranks, n_nodes), found in durations.items():
        if n_ranks > n_nodes * network.ranks_per_node:
            continue  # of another machine
        modelled = network.time_us(Collective(collective), float(size), CommunicatorClass(n_ranks, n_nodes))
        if modelled > 0:
            factors.append(median(found) / modelled)
    return factors


def _busy_us(step: StepRecord) -> float:
    return step.duration_us - (step.exposed_us or 0.0)


def compute_factor(problem: Problem, ran: ZeroConfiguration, steps: list[StepRecord]) -> float:
    """Ratio of measured to modelled computation; a step's exposed communication and its slowdown are left out.

    Raises:
        UserError: these cannot be steps of this model.
    """
    parts = step_parts(problem, ran)
    modelled = parts.total_s - parts.exposed_s - parts.contention_s - parts.tensor_parallel_s
    known = [step.duration_us - step.exposed_us for step in steps if step.exposed_us is not None]
    busy_s = median(known or [step.duration_us for step in steps]) / 1e6 - (0.0 if known else parts.exposed_s)
    lost_s = parts.contention_s + parts.tensor_parallel_s
    # Faster computation than modelled also loses less beside communication.
    seconds = max(busy_s - lost_s, busy_s * modelled / (modelled + lost_s))
    if seconds <= 0 or not 1 / _MOST_OFF < seconds / modelled < _MOST_OFF:
        raise UserError(
            f"steps of {1e3 * seconds:.3g} ms of computation are not those of this model, which takes "
            f"{1e3 * modelled:.3g} ms",
            "say with --ran what ran, and name the model and the machine that it ran on",
        )
    return seconds / modelled


def _with_memory(problem: Problem, ran: ZeroConfiguration, pressure: float, origin: str) -> tuple[Problem, str]:
    """Add the memory that the model does not know."""
    modelled = memory_of(problem, ran).total_bytes
    seen = pressure * problem.cluster.gpu.memory_bytes
    other = max(0.0, problem.constants.runtime_bytes + seen - modelled)
    changed = msgspec.structs.replace(problem.constants, runtime_bytes=other)
    expected = modelled / problem.cluster.gpu.memory_bytes
    sentence = f"memory was {pressure:.0%} full in {origin}, where the model says {expected:.0%}"
    return msgspec.structs.replace(problem, constants=changed), sentence
