"""What the ZeRO paper and the articles state, and what we make of it: one `Stated` per figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Final

from benchmarks.advice.zero_paper_model import (
    CONSTANTS,
    PaperRun,
    configuration,
    largest_model,
    paper_runs,
    problem,
    step,
)
from zerotune.tuner.advice.prediction.memory import batch_that_fits
from zerotune.tuner.advice.zero_formulas import STAGE_NAMES, model_states, sent_elements
from zerotune.tuner.offline import overlap_report

RUNS: Final = paper_runs()
PLOT: Final = "read from the plot"
"""By a public note on the paper; the figure has no numbers."""
_GB: Final = 1e9
_NOTES: Final = {
    "C2": "disagrees with the paper's own formulas, see below",
    "C5": "ZeRO-100B below is C5 with 170B and a batch of 12",
}
"""On sizes of Figure 6, by configuration."""


@dataclass(frozen=True)
class Stated:
    """One figure of theirs and ours."""

    what: str
    where: str
    theirs: float
    ours: float
    unit: str
    note: str = ""

    @property
    def error(self) -> float:
        """Ours over theirs, minus 1."""
        return self.ours / self.theirs - 1


def run(figure: int, model: str, kind: str, n_gpus: int | None = None) -> PaperRun:
    """One row."""
    return next(
        row
        for row in RUNS
        if (row.figure, row.model, row.kind) == (figure, model, kind) and n_gpus in (None, row.n_gpus)
    )


def tflops(row: PaperRun) -> float:
    """Per GPU, with recomputation."""
    return step(row).hardware_tflops


def largest_models() -> Iterator[Stated]:
    """The largest model per configuration, billions of parameters."""
    for row in RUNS:
        if row.figure == 6:
            stated = row.stated_parameters / 1e9
            note = _NOTES.get(row.kind, "")
            yield Stated(
                f"{row.kind}, MP 16, batch 16", "Figure 6, Table 7", stated, largest_model(row) / 1e9, "B", note
            )
    zero = run(4, "13B", "ZeRO")
    yield Stated("ZeRO without MP, batch 2", "Figure 4, Table 10", 13.0, largest_model(zero) / 1e9, "B")
    plain = run(4, "1.38B", "baseline")
    yield Stated("data parallelism alone, batch 1", "section 10.4", 1.4, largest_model(plain) / 1e9, "B")
    last = run(2, "170B", "ZeRO")
    yield Stated("ZeRO-100B, MP 16, batch 12", "section 10.2", 170.0, largest_model(last) / 1e9, "B")
    batch = int(median(row.batch for row in RUNS if (row.table, row.kind) == (5, "baseline")))
    of_one = [row.error for row in _table_2(1)]
    note = (
        "Table 2 states neither shapes nor batches: width 1920, 3072 for P_os, times the root of MP; batch "
        f"{batch}, the median of Table 5's baselines (with batch 1: {min(of_one):+.0%} to {max(of_one):+.0%})"
    )
    for one in _table_2(batch):
        yield replace(one, note=note)
        note = ""


def _table_2(batch: int) -> Iterator[Stated]:
    for split, baseline, p_os in (
        (1, 1.3, 6.2), (2, 2.5, 12.5), (4, 5.0, 25.0), (8, 10.0, 50.0), (16, 20.0, 100.0)
    ):  # fmt: skip
        for kind, theirs, width in (("baseline", baseline, 1920), ("C1", p_os, 3072)):
            grown = 256 * round(width * split**0.5 / 256)
            row = PaperRun(2, 0, "1B", kind, 64 * split, split, 1, grown, grown // 128, batch, 64 * batch)
            what = f"measured, {kind if kind == 'baseline' else 'P_os'}, MP {split}"
            yield Stated(what, "Table 2", theirs, largest_model(row) / 1e9, "B")


def throughputs() -> Iterator[Stated]:
    """TFLOP/s per GPU."""
    middle = [tflops(run(2, model, "ZeRO")) for model in ("8B", "40B", "60B", "80B", "100B")]
    without = [tflops(row) for row in RUNS if row.figure == 4 and row.kind == "ZeRO"]
    unit = "TFLOP/s"
    yield Stated("100B on 400 GPUs", "section 1, Figure 2", 38.0, tflops(run(2, "100B", "ZeRO")), unit, '"over 38"')
    yield Stated("8B to 100B, mean", "section 10.2, Figure 2", 37.5, mean(middle), unit, "15 PFLOP/s on 400 GPUs")
    yield Stated("40B, Megatron alone on two nodes", "section 1", 5.0, tflops(run(2, "40B", "baseline")), unit,
                 "\"about 5\"")  # fmt: skip
    yield Stated("100B, Megatron alone", "section 10.2, Figure 2", 3.8, tflops(run(2, "100B", "baseline")), unit,
                 "ZeRO is 10 times as fast")  # fmt: skip
    yield Stated("1.5B to 13B without MP, mean", "section 10.4, Figure 4", 40.0, mean(without), unit, '"over 40"')
    yield Stated("1.38B, data parallelism alone", "section 10.4, Figure 4", 20.0, tflops(run(4, "1.38B", "baseline")),
                 unit, "\"less than 20\"")  # fmt: skip
    turing = PaperRun(0, 5, "17B", "C4", 256, 4, 78, 4256, 28, 1, 64)
    batch = batch_that_fits(problem(turing), configuration("C4", turing))
    turing = PaperRun(0, 5, "17B", "C4", 256, 4, 78, 4256, 28, batch, 64 * batch)
    yield Stated("Turing-NLG, 17B", "section 10.6, Figure 5", 41.4, tflops(turing), unit,
                 f"78 layers of 4256, MP 4, 256 GPUs: press; batch {batch} is the largest that fits")  # fmt: skip
    yield Stated("60B on 64 GPUs", "Figure 3", 25.0, tflops(run(3, "60B", "ZeRO", 64)), unit, PLOT)
    yield Stated("60B on 400 GPUs", "Figure 3", 38.0, tflops(run(3, "60B", "ZeRO", 400)), unit, PLOT)
    for model, theirs in (("1.5B", 40.0), ("8B", 47.0), ("13B", 35.0)):
        yield Stated(f"{model} without MP", "Figure 4", theirs, tflops(run(4, model, "ZeRO")), unit, PLOT)


def memory() -> Iterator[Stated]:
    """GB that the paper states outside its tables."""
    activations = 12 * 48 * 2 * 32 * 1024 * 1600 / _GB  # footnote 3: about 12 inputs of each of 48 blocks, 2 bytes each
    checkpoints = 125 * 2 * 32 * 1024 * 8192 / _GB  # one input of each of 125 blocks
    yield Stated("activations, 1.5B, batch 32", "section 3.2", 60.0, activations, "GB")
    yield Stated("checkpoints, 100B, batch 32", "section 3.2", 60.0, checkpoints, "GB", '"around 60"')
    yield Stated("checkpoints, 100B, batch 32", "section 6.1", 33.0, checkpoints, "GB", "contradicts section 3.2")
    yield Stated("the same with P_a, MP 16", "section 6.1", 2.0, checkpoints / 16, "GB", "follows from the 33")
    yield Stated("fused fp32 buffer, 3B", "section 6.2", 12.0, 4 * 3.0, "GB")
    for stage, theirs in ((0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)):
        ours = model_states(7.5e9, stage, 64).total_bytes / _GB
        yield Stated(f"7.5B on 64 ranks, {STAGE_NAMES[stage]}", "Figure 1 and an article", theirs, ours, "GB")
    for stage, theirs in ((0, 112.0), (1, 63.0), (2, 38.5), (3, 14.0)):
        ours = model_states(7e9, stage, 8, precision="fp32").total_bytes / _GB
        yield Stated(f"7B on 8 ranks, fp32, {STAGE_NAMES[stage]}", "an article", theirs, ours, "GB")


def traffic() -> Iterator[Stated]:
    """Elements per parameter and step, and up to how many ranks a layer's gather hides."""
    for stage, theirs in ((0, 2.0), (1, 2.0), (2, 2.0), (3, 3.0)):
        ours = sent_elements(1.0, stage)
        yield Stated(
            f"sent per parameter, {STAGE_NAMES[stage]}", "section 7, articles", theirs, ours, "elements"
        )
    found = overlap_report.overlaps("h100_ib_16", 50e6, 4096, 64)
    first = next(row.n_ranks for row in found.rows if not row.is_hidden)
    yield Stated("ranks from which gathers no longer hide", "an article", 512.0, first, "ranks",
                 "a layer of 50M parameters, 4096 tokens per rank, eight H100 per node")  # fmt: skip


def remedy_holds() -> bool:
    """Whether groups of 64 ranks hide gathers at every size that was asked about."""
    return all(row.is_group_hidden for row in overlap_report.overlaps("h100_ib_16", 50e6, 4096, 64).rows)


def scaling(batch: Callable[[PaperRun], int]) -> list[tuple[int, int, float]]:
    """Figure 3: GPUs, batch, TFLOP/s per GPU, with a batch of each row's choosing."""
    found = []
    for row in (one for one in RUNS if one.figure == 3):
        changed = PaperRun(**{**{name: getattr(row, name) for name in PaperRun.__annotations__}, "batch": batch(row)})
        found.append((row.n_gpus, changed.batch, tflops(changed)))
    return found


def largest_batch(row: PaperRun) -> int:
    """That fits, by our memory model."""
    return batch_that_fits(problem(row, CONSTANTS), configuration("C4", row))
