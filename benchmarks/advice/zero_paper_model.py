"""The ZeRO paper's runs, as `zerotune advise` would see them, with one set of constants for all.

zero_paper_tables.csv has the paper's Tables 5 to 10, row by row. What a table calls its figure is not always the figure
of the text: the column `figure` has the text's number. Tables 7 to 9 do not name configurations. Table 7's sizes show
its order, C1, C2, C4, C5, C3; in the same order, Table 9's batches fit 32 GB, and in the order C1 to C5 they do not.
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
"""Those of `advise`, but for three, chosen once for all rows: what V100s, kernels and NCCL of early 2020 reached."""
DGX2: Final = Links(capability=70, ranks_per_node=16, gpu_gbs=120.0, node_gbs=25.0)
"""Six NVLinks per GPU. Of a node's 800 Gb/s (section 10.1) a quarter: the paper's own two-node baseline, 5 TFLOP/s, and
its words of 12.5 GB/s per link (section 10.2) leave no more to one communicator. Chosen once, with the constants."""
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
        """By its name."""
        return float(self.model.removesuffix("B")) * 1e9

    @property
    def shape(self) -> ModelShape:
        """By its layers and width."""
        return _gpt2(self.n_layers, self.width, self.n_heads)

    @cached_property
    def configuration(self) -> ZeroConfiguration:
        """ZeRO runs are C4, and C5 where C4 does not fit; baselines data parallelism with one fused buffer."""
        kind = self.kind
        if kind == "ZeRO":
            kind = "C4" if self.n_model_parallel > 1 else "C3"
            if kind == "C4" and batch_that_fits(problem(self), configuration("C4", self)) < self.batch:
                kind = "C5"
        return configuration(kind, self)


def _gpt2(n_layers: int, width: int, n_heads: int) -> ModelShape:
    return from_dimensions(n_layers, width, n_heads, N_CONTEXT, 50257, learned_positions=True)


def configuration(kind: str, run: PaperRun) -> ZeroConfiguration:
    """C1 to C5, or `baseline`, with the run's batch and model parallelism."""
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
    """The paper's cluster with the run's model."""
    n_nodes = -(-run.n_gpus // DGX2.ranks_per_node)
    network = LinkNetwork(DGX2, constants.network_share)
    per_node = min(DGX2.ranks_per_node, run.n_gpus)
    cluster = Cluster("DGX-2", n_nodes, gpu("v100_32gb"), network, per_node)
    return Problem(shape=run.shape, cluster=cluster, software=SOFTWARE, constants=constants)


def step(run: PaperRun, constants: Constants = CONSTANTS) -> StepEstimate:
    """What `advise` expects."""
    return estimate(problem(run, constants), run.configuration)


def largest_model(run: PaperRun, constants: Constants = CONSTANTS) -> float:
    """Parameters of the deepest model of the run's width that fits with the run's batch; 0: not one block does."""
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
    """That `advise` expects a GPU to hold."""
    return choice_of(problem(run), run.configuration).memory.total_bytes / MB_PER_GB


def paper_runs() -> list[PaperRun]:
    """All rows, in the file's order."""
    with FILE.open(encoding="utf-8", newline="") as lines:
        return [
            # The file's text is read as the fields say: numbers where they are numbers.
            msgspec.convert(row, PaperRun, strict=False)
            for row in csv.DictReader(lines)
        ]
