"""The ZeRO paper's runs as problems for `zerotune advise`, with one set of constants for all.

zero_paper_tables.csv has the paper's Tables 5 to 10, row by row. The column `figure` has the number of the text, which
differs from the table's in places. Tables 7 to 9 do not name configurations. Table 7's sizes show its order: C1, C2,
C4, C5, C3. In this order Table 9's batches fit 32 GB. In the order C1 to C5 they do not.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from zerotune.tuner.advice.constants import DEFAULT, Constants
from zerotune.tuner.advice.hardware.clusters import Cluster
from zerotune.tuner.advice.hardware.gpus import gpu
from zerotune.tuner.advice.hardware.network import LinkNetwork, Links
from zerotune.tuner.advice.models.model_shape import ModelShape, from_dimensions
from zerotune.tuner.advice.prediction.memory import batch_that_fits, memory_of
from zerotune.tuner.advice.prediction.step import StepEstimate, estimate
from zerotune.tuner.advice.problem import Problem, Software, ZeroConfiguration
from zerotune.tuner.advice.search import choice_of

FILE: Final = Path(__file__).with_name("zero_paper_tables.csv")
CONSTANTS: Final[Constants] = msgspec.structs.replace(DEFAULT, matmul_shares={70: 0.55}, traffic=2.2, network_share=0.9)
"""Three constants differ from those of `advise`: the shares that V100s, kernels and NCCL of early 2020 reached."""
DGX2: Final = Links(capability=70, ranks_per_node=16, gpu_gbs=120.0, node_gbs=25.0)
"""Six NVLinks per GPU. `node_gbs` is a quarter of a node's 800 Gb/s (section 10.1).

The paper's two-node baseline of 5 TFLOP/s and its 12.5 GB/s per link (section 10.2) leave no more to one communicator.
"""
SOFTWARE: Final = Software(precision="fp16", flash=False)
N_CONTEXT: Final = 1024
MB_PER_GB: Final = 1e9


@dataclass(frozen=True)
class PaperRun:
    """One row of Tables 5 to 10. `kind`: ZeRO, baseline, or C1 to C5."""

    table: int
    figure: int
    model: str
    kind: str
    n_gpus: int
    n_model_parallel: int
    n_layers: int
    width: int
    n_heads: int
    batch: int
    total_batch: int

    @property
    def stated_parameters(self) -> float:
        """The number in the model's name."""
        return float(self.model.removesuffix("B")) * 1e9

    @property
    def shape(self) -> ModelShape:
        return _gpt2(self.n_layers, self.width, self.n_heads)

    @cached_property
    def configuration(self) -> ZeroConfiguration:
        """ZeRO runs are C4, or C5 if C4 does not fit. Baselines are data parallelism with one fused buffer."""
        kind = self.kind
        if kind == "ZeRO":
            kind = "C4" if self.n_model_parallel > 1 else "C3"
            if kind == "C4" and batch_that_fits(problem(self), configuration("C4", self)) < self.batch:
                kind = "C5"
        return configuration(kind, self)


def _gpt2(n_layers: int, width: int, n_heads: int) -> ModelShape:
    return from_dimensions(n_layers, width, n_heads, N_CONTEXT, 50257, learned_positions=True)


def configuration(kind: str, run: PaperRun) -> ZeroConfiguration:
    """`kind`: C1 to C5, or `baseline`."""
    stage, partition, offload = {
        "baseline": (0, False, False),
        "C1": (1, False, False),
        "C2": (1, True, False),
        "C3": (2, False, False),
        "C4": (2, True, False),
        "C5": (2, True, True),
    }[kind]
    base = ZeroConfiguration(
        stage=stage,
        micro_batch=run.batch,
        n_model_parallel=run.n_model_parallel,
        recompute="full",
        partition_activations=partition,
        offload_activations=offload,
    )
    return base if stage else msgspec.structs.replace(base, bucket_bytes=None)


def problem(run: PaperRun, constants: Constants = CONSTANTS) -> Problem:
    n_nodes = -(-run.n_gpus // DGX2.ranks_per_node)
    network = LinkNetwork(DGX2, constants.network_share)
    per_node = min(DGX2.ranks_per_node, run.n_gpus)
    cluster = Cluster("DGX-2", n_nodes, gpu("v100_32gb"), network, per_node)
    return Problem(shape=run.shape, cluster=cluster, software=SOFTWARE, constants=constants)


def step(run: PaperRun, constants: Constants = CONSTANTS) -> StepEstimate:
    return estimate(problem(run, constants), run.configuration)


def largest_model(run: PaperRun, constants: Constants = CONSTANTS) -> float:
    """Parameters of the deepest model of the run's width that fits with the run's batch; 0: not one block fits."""
    one = run.configuration
    asked = problem(run, constants)
    limit = gpu("v100_32gb").memory_bytes * constants.usable_memory
    found = 0.0
    for n_layers in range(1, 1000):
        model = _gpt2(n_layers, run.width, run.n_heads)
        if memory_of(msgspec.structs.replace(asked, shape=model), one).total_bytes > limit:
            break
        found = model.n_parameters
    return found


def memory_gb(run: PaperRun) -> float:
    return choice_of(problem(run), run.configuration).memory.total_bytes / MB_PER_GB


def paper_runs() -> list[PaperRun]:
    with FILE.open(encoding="utf-8", newline="") as lines:
        return [
            # msgspec turns the file's text into numbers if the field is a number.
            msgspec.convert(row, PaperRun, strict=False)
            for row in csv.DictReader(lines)
        ]
