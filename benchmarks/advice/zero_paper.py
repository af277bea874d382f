"""The ZeRO paper's evaluation beside ours: sizes and speeds with their errors, its tables, and its claims.

docs/design/replay.md has the comparison in words.

Run: python -m benchmarks zero_paper [--quick] [--json]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Final

from benchmarks.advice.zero_paper_model import (
    PaperRun,
    configuration,
    largest_model,
    memory_gb,
    paper_runs,
    problem,
    step,
)
from benchmarks.lib.reporting import Result, options_of, report
from zerotune.tuner.advice import zero_formulas
from zerotune.tuner.advice.prediction.memory import batch_that_fits

RUNS: Final = paper_runs()
PRINTED_TABLE_1: Final = {
    1: ("120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"),
    4: ("52.5", "41.3", "30", "896", "704", "512", "7000", "5500", "4000"),
    16: ("35.6", "21.6", "7.5", "608", "368", "128", "4750", "2875", "1000"),
    64: ("31.4", "16.6", "1.88", "536", "284", "32", "4187", "2218", "250"),
    256: ("30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"),
    1024: ("30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6"),
}
"""GB by N_d: 7.5B, 128B and 1T under P_os, P_os+g, P_os+g+p."""
PRINTED_TABLE_2: Final = {
    1: (2.0, 7.6, 14.4, 128.0),
    2: (4.0, 15.2, 28.8, 256.0),
    4: (8.0, 30.4, 57.6, 500.0),
    8: (16.0, 60.8, 115.2, 1000.0),
    16: (32.0, 121.6, 230.4, 2000.0),
}
"""Theoretical columns, billions of parameters by MP."""


def run(figure: int, model: str, kind: str, n_gpus: int | None = None) -> PaperRun:
    return next(
        row
        for row in RUNS
        if (row.figure, row.model, row.kind) == (figure, model, kind) and n_gpus in (None, row.n_gpus)
    )


def tflops(row: PaperRun) -> float:
    """Per GPU, with recomputation."""
    return step(row).hardware_tflops


def largest_models() -> Iterator[tuple[float, float]]:
    """The largest model per configuration, theirs and ours, billions of parameters."""
    for row in RUNS:
        if row.figure == 6:
            yield row.stated_parameters / 1e9, largest_model(row) / 1e9
    # Figure 4 and Table 10; section 10.4; section 10.2.
    for theirs, row in (
        (13.0, run(4, "13B", "ZeRO")), (1.4, run(4, "1.38B", "baseline")), (170.0, run(2, "170B", "ZeRO"))
    ):  # fmt: skip
        yield theirs, largest_model(row) / 1e9
    # Table 2 states neither shapes nor batches: width 1920, 3072 for P_os, times the root of MP; Table 5's batches.
    batch = int(median(row.batch for row in RUNS if (row.table, row.kind) == (5, "baseline")))
    for split, baseline, p_os in (
        (1, 1.3, 6.2), (2, 2.5, 12.5), (4, 5.0, 25.0), (8, 10.0, 50.0), (16, 20.0, 100.0)
    ):  # fmt: skip
        for kind, theirs, width in (("baseline", baseline, 1920), ("C1", p_os, 3072)):
            grown = 256 * round(width * split**0.5 / 256)
            row = PaperRun(2, 0, "1B", kind, 64 * split, split, 1, grown, grown // 128, batch, 64 * batch)
            yield theirs, largest_model(row) / 1e9


def throughputs() -> Iterator[tuple[float, float]]:
    """TFLOP/s per GPU, theirs and ours."""
    middle = [tflops(run(2, model, "ZeRO")) for model in ("8B", "40B", "60B", "80B", "100B")]
    without = [tflops(row) for row in RUNS if row.figure == 4 and row.kind == "ZeRO"]
    yield 38.0, tflops(run(2, "100B", "ZeRO"))  # section 1, Figure 2: "over 38"
    yield 37.5, mean(middle)  # section 10.2: 15 PFLOP/s on 400 GPUs
    yield 5.0, tflops(run(2, "40B", "baseline"))  # section 1: "about 5"
    yield 3.8, tflops(run(2, "100B", "baseline"))  # section 10.2: ZeRO is 10 times as fast
    yield 40.0, mean(without)  # section 10.4: "over 40"
    yield 20.0, tflops(run(4, "1.38B", "baseline"))  # section 10.4: "less than 20"
    # Turing-NLG, section 10.6 and Figure 5; its shape is from the press, its batch is the largest that fits.
    turing = PaperRun(0, 5, "17B", "C4", 256, 4, 78, 4256, 28, 1, 64)
    batch = batch_that_fits(problem(turing), configuration("C4", turing))
    yield 41.4, tflops(replace(turing, batch=batch, total_batch=64 * batch))
    # Read from the plots of Figures 3 and 4, which have no numbers.
    yield 25.0, tflops(run(3, "60B", "ZeRO", 64))
    yield 38.0, tflops(run(3, "60B", "ZeRO", 400))
    for model, theirs in (("1.5B", 40.0), ("8B", 47.0), ("13B", 35.0)):
        yield theirs, tflops(run(4, model, "ZeRO"))


def scaling(batch: int = 0) -> list[tuple[int, float]]:
    """Figure 3: GPUs and TFLOP/s per GPU. `batch` 0: the paper's batches."""
    rows = (row for row in RUNS if row.figure == 3)
    return [(row.n_gpus, tflops(replace(row, batch=batch or row.batch))) for row in rows]


def _wrong_cells() -> int:
    found = sum(
        cell != printed
        for n_ranks, cells in zero_formulas.table_1()
        for cell, printed in zip(cells.values(), PRINTED_TABLE_1[n_ranks], strict=True)
    )
    for split, _, sizes in zero_formulas.table_2():
        found += sum(abs(ours / theirs - 1) > 0.03 for ours, theirs in zip(sizes, PRINTED_TABLE_2[split], strict=True))
    return found


def _speedup(points: Sequence[tuple[int, float]]) -> float:
    return points[-1][0] * points[-1][1] / (points[0][0] * points[0][1])


def claims() -> list[tuple[str, bool]]:
    """The paper's statements about figures without numbers, and whether they hold here."""
    gb = {kind: memory_gb(run(7, "40B", kind)) for kind in ("C1", "C2", "C3", "C4", "C5")}
    large = {kind: memory_gb(run(7, "100B", kind)) for kind in ("C4", "C5")}
    speed = {kind: step(run(8, "60B", kind)).hardware_tflops for kind in ("C1", "C2", "C3", "C4", "C5")}
    last = run(8, "170B", "C5")
    return [
        ("Figure 7: cached memory falls from C1 to C2", gb["C2"] < gb["C1"]),
        ("Figure 7: it hardly falls from C4 to C5 for 40B", gb["C4"] - gb["C5"] < 1),
        ("Figure 7: it does for 100B", large["C4"] - large["C5"] > 2),
        ("Figure 8: what takes less memory is faster, C1 to C4", speed["C1"] < speed["C2"] < speed["C4"]),
        ("Figure 8: C5 is slower than C4 for 60B", speed["C5"] < 0.99 * speed["C4"]),
        (
            "Figure 8: 170B runs with C5 alone",
            batch_that_fits(problem(last), configuration("C4", last))
            < last.batch
            <= batch_that_fits(problem(last), last.configuration),
        ),
    ]


def results() -> list[Result]:
    sizes, speeds = ([abs(ours / theirs - 1) for theirs, ours in some] for some in (largest_models(), throughputs()))
    held = [holds for _, holds in claims()]
    return [
        Result("largest_model_error_median", median(sizes), "share", "<= 0.1"),
        Result("largest_model_error_worst", max(sizes), "share"),
        Result("throughput_error_median", median(speeds), "share", "<= 0.2"),
        Result("throughput_error_worst", max(speeds), "share", "<= 0.35"),
        Result("speedup_64_to_400_gpus", _speedup(scaling()), "times", "> 6.25"),
        Result("speedup_64_to_400_gpus_same_batch", _speedup(scaling(16)), "times", "<= 6.25"),
        Result("table_cells_that_differ", _wrong_cells(), "cells", "0"),
        Result("claims_that_hold_share", sum(held) / len(held), "share"),
    ]


def main() -> None:
    options = options_of(__doc__, quick="is always quick; for scripts that run all benchmarks").parse_args()
    report("zero_paper", results(), as_json=options.json)


if __name__ == "__main__":
    main()
