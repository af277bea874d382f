"""How far `zerotune advise` is off published FSDP and DeepSpeed runs; half of them had no say in its constants.

`--fit` chooses the constants anew by the other half (published_runs.py splits the runs). Peaks of memory are compared
beside DeepSpeed's estimator.

Run: python -m benchmarks advise_error [--fit] [--quick] [--json]
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median, quantiles
from typing import Final

import msgspec

from benchmarks.advice.published_runs import PublishedRun, published_runs
from benchmarks.lib.reporting import Result, options_of, report
from zerotune.tuner.advice.constants import DEFAULT, Constants
from zerotune.tuner.advice.hardware.clusters import Cluster
from zerotune.tuner.advice.hardware.gpus import gpu
from zerotune.tuner.advice.hardware.network import LinkNetwork, Links
from zerotune.tuner.advice.models.model_shape import ModelShape
from zerotune.tuner.advice.prediction.memory import memory_of
from zerotune.tuner.advice.prediction.step import StepEstimate, estimate
from zerotune.tuner.advice.problem import Problem, Recompute, Software, ZeroConfiguration

_NVLINK_GBS: Final = {
    "a100_40gb": 240.0,
    "a100_80gb": 240.0,
    "a800_80gb": 160.0,
    "h100_80gb": 370.8,
    "h100_96gb": 370.8,
}
"""As NCCL counts the links of each GPU."""
_UNIT_BYTES: Final = 1 << 40
"""The frameworks here reduce and gather a block in one message."""
_RECOMPUTE: Final[dict[str, Recompute]] = {"none": "none", "half": "half", "selective": "half", "full": "full"}
_FITTED: Final = ("ampere", "hopper", "attention_share", "traffic", "network_share", "contention")
_START: Final = (0.74, 0.58, 0.6, 3.0, 0.73, 0.4)
_BOUNDS: Final = ((0.5, 0.95), (0.4, 0.95), (0.2, 1.0), (0.5, 6.0), (0.2, 1.0), (0.0, 1.0))


def shape_of(run: PublishedRun) -> ModelShape:
    return ModelShape(
        n_layers=run.n_layers,
        width=run.width,
        n_heads=run.n_heads,
        n_kv_heads=run.n_kv_heads or run.n_heads,
        head_width=run.width // run.n_heads,
        ffn_width=run.ffn_width,
        gated=run.gated,
        vocabulary=run.vocabulary,
        n_context=run.n_context,
        tied=not run.gated,
    )


def problem_of(run: PublishedRun, constants: Constants = DEFAULT) -> tuple[Problem, ZeroConfiguration]:
    n_nodes = -(-run.n_gpus // run.gpus_per_node)
    links = Links(
        capability=gpu(run.gpu).capability,
        ranks_per_node=run.gpus_per_node,
        gpu_gbs=_NVLINK_GBS[run.gpu],
        node_gbs=run.network_gbps / 8,
    )
    cluster = Cluster(
        run.name,
        n_nodes,
        gpu(run.gpu),
        LinkNetwork(links, constants.network_share),
        min(run.gpus_per_node, run.n_gpus),
    )
    configuration = ZeroConfiguration(
        stage=run.stage,
        micro_batch=run.micro_batch,
        accumulation=run.accumulation,
        shard_ranks=run.shard_ranks,
        recompute=_RECOMPUTE[run.recompute],
        bucket_bytes=_UNIT_BYTES if run.stage == 3 else 500_000_000,
    )
    software = Software(precision=run.precision, flash=run.flash, compiled=run.compiled)
    problem = Problem(shape=shape_of(run), cluster=cluster, software=software, constants=constants)
    return problem, configuration


def predict(run: PublishedRun, constants: Constants = DEFAULT) -> StepEstimate:
    return estimate(*problem_of(run, constants))


def predicted_memory_gb(run: PublishedRun, constants: Constants = DEFAULT) -> float:
    """Peak of a GPU, 10^9 bytes."""
    return memory_of(*problem_of(run, constants)).total_bytes / 1e9


def deepspeeds_memory_gb(run: PublishedRun) -> float:
    """The estimate of DeepSpeed's formulas without offload and without activations, 10^9 bytes.

    https://deepspeed.readthedocs.io/en/latest/memory.html
    """
    shape = shape_of(run)
    shared = 18 * shape.n_parameters / run.n_gpus
    largest = max(shape.block_parameters / 3, shape.vocabulary * shape.width)
    return ((4 * largest if run.stage == 3 else 2 * shape.n_parameters) + shared) / 1e9


def predicted_value(run: PublishedRun, constants: Constants = DEFAULT) -> float:
    """In the unit of the run."""
    step = predict(run, constants)
    if run.unit == "hardware_tflops":
        return step.hardware_tflops
    tokens_per_s_gpu = step.tokens_per_s.expected / run.n_gpus
    if run.unit == "model_tflops":
        return tokens_per_s_gpu * shape_of(run).model_flops_per_token() / 1e12
    return tokens_per_s_gpu


def error(run: PublishedRun, constants: Constants = DEFAULT) -> float:
    """Predicted over published throughput, minus 1."""
    return predicted_value(run, constants) / run.value - 1


def constants_of(values: Iterable[float], base: Constants = DEFAULT) -> Constants:
    """`values` replace the constants of _FITTED, in its order."""
    found = dict(zip(_FITTED, map(float, values), strict=True))
    shares = {**base.matmul_shares, 80: found.pop("ampere"), 90: found.pop("hopper")}
    return msgspec.structs.replace(base, matmul_shares=shares, **found)


def fit(runs: list[PublishedRun], say: Callable[[str], None]) -> Constants:
    """The constants of the least mean error of logarithms; each publisher counts by the root of its runs."""
    from scipy.optimize import minimize

    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        counts[run.publisher] += 1

    def loss(values: Iterable[float]) -> float:
        constants = constants_of(values)
        return sum(
            abs(math.log(predicted_value(run, constants) / run.value)) / math.sqrt(counts[run.publisher])
            for run in runs
        ) / sum(math.sqrt(count) for count in counts.values())

    def progress(values: Iterable[float]) -> None:
        say(f"mean error {loss(values):.4f} at {[round(float(value), 3) for value in values]}")

    found = minimize(
        loss, _START, method="Powell", bounds=_BOUNDS, callback=progress, options={"xtol": 1e-3, "ftol": 1e-4}
    )
    return constants_of(found.x)


def main() -> None:
    parser = options_of(__doc__, quick="is always quick; for scripts that run all benchmarks")
    parser.add_argument("--fit", action="store_true", help="choose the constants anew by the runs not set aside")
    options = parser.parse_args()
    runs = published_runs()
    constants = DEFAULT
    if options.fit:
        constants = fit([run for run in runs if not run.is_set_aside], lambda line: print(line, file=sys.stderr))
        print(constants, file=sys.stderr)
    report("advise_error", results(runs, constants), as_json=options.json)


def _memory_results(runs: list[PublishedRun], constants: Constants) -> list[Result]:
    """No constant was fitted to a peak of memory."""
    stating = [run for run in runs if run.memory_gb]
    ours = median(abs(predicted_memory_gb(run, constants) / run.memory_gb - 1) for run in stating)
    theirs = median(abs(deepspeeds_memory_gb(run) / run.memory_gb - 1) for run in stating)
    return [
        Result("memory_error_median", ours, "share", peer="DeepSpeed's estimator", ratio=ours / theirs),
        Result("memory_error_median_deepspeed", theirs, "share"),
        Result("memory_runs", len(stating), "runs"),
    ]


def _in_range_share(runs: list[PublishedRun], constants: Constants) -> float:
    within = 0
    for run in runs:
        step, off = predict(run, constants).step_s, predicted_value(run, constants) / run.value
        within += step.low / step.expected <= off <= step.high / step.expected
    return within / len(runs)


def comparison_errors(runs: Iterable[PublishedRun], constants: Constants = DEFAULT) -> list[float]:
    alike = defaultdict(list)
    for run in runs:
        common = replace(
            run, name=run.publisher, n_gpus=0, stage=0, shard_ranks=0, recompute="", micro_batch=0, accumulation=0,
            value=0.0, memory_gb=0.0, note="",
        )  # fmt: skip
        alike[common].append(math.log(1 + error(run, constants)))
    return [abs(one - other) for errors in alike.values() for one, other in itertools.combinations(errors, 2)]


def _comparison_results(aside: list[PublishedRun], seen: list[PublishedRun], constants: Constants) -> list[Result]:
    """Runs in `seen` chose the range of a comparison; runs in `aside` test it."""
    held_out = comparison_errors(aside, constants)
    within = sum(one <= constants.comparison_spread for one in held_out) / len(held_out)
    return [
        Result("comparison_error_p90", quantiles(comparison_errors(seen, constants), n=10)[-1], "log"),
        Result("held_out_comparisons_in_range_share", within, "share", ">= 0.9"),
        Result("held_out_comparisons", len(held_out), "pairs"),
    ]


def results(runs: list[PublishedRun], constants: Constants = DEFAULT) -> list[Result]:
    aside, seen = ([run for run in runs if run.is_set_aside is kept] for kept in (True, False))
    errors = [abs(error(run, constants)) for run in aside]
    by_publisher = defaultdict(list)
    for run, value in zip(aside, errors, strict=True):
        by_publisher[run.publisher].append(value)
    deepspeed = [value for run, value in zip(aside, errors, strict=True) if run.framework == "DeepSpeed"]
    return [
        Result("held_out_runs_error_median", median(errors), "share", "<= 0.15"),
        Result("held_out_runs_error_worst", max(errors), "share"),
        Result("held_out_publishers_error_median", median(map(median, by_publisher.values())), "share"),
        Result("held_out_deepspeed_error_median", median(deepspeed), "share"),
        Result("held_out_in_range_share", _in_range_share(aside, constants), "share", ">= 0.9"),
        Result("held_out_runs", len(errors), "runs"),
        Result("fitted_in_range_share", _in_range_share(seen, constants), "share", ">= 0.9"),
        Result("fitted_runs_error_median", median(abs(error(run, constants)) for run in seen), "share"),
        *_comparison_results(aside, seen, constants),
        *_memory_results(runs, constants),
    ]


if __name__ == "__main__":
    main()
