"""The paper's tables and the article's figures, cell by cell, as printed there."""

from __future__ import annotations

import pytest

from zerotune.zero_runtime import analysis

TABLE_1 = """
1 120 120 120 2048 2048 2048 16000 16000 16000
4 52.5 41.3 30 896 704 512 7000 5500 4000
16 35.6 21.6 7.5 608 368 128 4750 2875 1000
64 31.4 16.6 1.88 536 284 32 4187 2218 250
256 30.4 15.4 0.47 518 263 8 4046 2054 62.5
1024 30.1 15.1 0.12 513 257 2 4011 2013 15.6
"""
TABLE_2 = """
1 64 2 7.6 14.4 128
2 128 4 15.2 28.8 256
4 256 8 30.4 57.6 512
8 512 16 60.8 115.2 1024
16 1024 32 121.6 230.4 2048
"""


def test_table_1() -> None:
    rows = [line.split() for line in TABLE_1.strip().splitlines()]
    assert [[str(n), *cells.values()] for n, cells in analysis.table_1()] == rows


def test_table_2() -> None:
    """The paper writes 512B, 1024B and 2048B as 0.5T, 1T and 2T."""
    rows = [[float(cell) for cell in line.split()] for line in TABLE_2.strip().splitlines()]
    assert [[mp, gpus, *sizes] for mp, gpus, sizes in analysis.table_2()] == rows


@pytest.mark.parametrize(("stage", "gb"), [(0, 112.0), (1, 63.0), (2, 38.5), (3, 14.0)])
def test_seven_billion_in_fp32_on_eight_ranks(stage: int, gb: float) -> None:
    assert analysis.model_states(7e9, stage, 8, precision="fp32").total_bytes == gb * 1e9


@pytest.mark.parametrize(
    ("optimizer", "precision", "k"),
    [
        ("adam", "fp16", 12),
        ("adamw", "bf16", 12),
        ("adam", "fp32", 8),
        ("momentum", "bf16", 8),
        ("sgd", "fp32", 0),
    ],
)
def test_multiplier(optimizer: str, precision: str, k: int) -> None:
    assert analysis.optimizer_multiplier(optimizer, precision) == k


def test_a_trillion_parameters_on_1024_ranks_take_16_gb() -> None:
    assert analysis.model_states(1e12, 3, 1024).total_bytes == pytest.approx(15.625e9)


def test_traffic() -> None:
    assert [analysis.step_traffic(100, s).total_elements for s in (0, 1, 2, 3)] == [200, 200, 200, 300]
    assert analysis.step_traffic(100, 3, n_layers=12).n_gathers == 23


def test_activations_of_gpt2() -> None:
    """Section 3.2: 1.5B parameters, 1K tokens, batch 32: about 60 GB."""
    shape = analysis.TransformerShape(48, 1600, 1024, 32)
    assert analysis.activation_bytes(shape) == pytest.approx(60e9, rel=0.01)


def test_partitioning_divides_checkpoints_by_the_degree() -> None:
    """Section 6.1, 100B: "about 33 GB" to "about 2 GB" (one byte per element) at MP 16."""
    shape = analysis.TransformerShape(125, 8192, 1024, 32)
    assert analysis.checkpoint_bytes(shape, 1, 1) == pytest.approx(33e9, rel=0.02)
    assert analysis.checkpoint_bytes(shape, 16, 1) == pytest.approx(2e9, rel=0.05)


def advise(data_parallel_gbs: float, free_gb: float, cpu_gbs: float = 10.0) -> str:
    shape = analysis.TransformerShape(125, 8192, 1024, 1)
    links = analysis.Links(300.0, data_parallel_gbs, cpu_gbs)
    return analysis.advise_activation_partitioning(shape, 100e9, 2, 16, links, free_gb * 1e9).choice


def test_partitioning_pays_only_where_data_parallel_traffic_is_the_bottleneck() -> None:
    assert advise(data_parallel_gbs=1e6, free_gb=200) == "none"
    assert advise(data_parallel_gbs=10, free_gb=40) == "P_a"


def test_offloading_pays_only_when_almost_nothing_fits() -> None:
    assert advise(data_parallel_gbs=1, free_gb=0.2) == "P_a+cpu"
    assert advise(data_parallel_gbs=10, free_gb=8, cpu_gbs=0.05) == "P_a"


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="stage is 4"):
        analysis.model_states(1, 4, 1)
    with pytest.raises(ValueError, match="optimizer is 'magic'"):
        analysis.optimizer_multiplier("magic")
    with pytest.raises(ValueError, match="0"):
        analysis.model_states(1, 1, 0)
