"""The paper's tables and the article's figures, cell by cell, as printed there."""

from __future__ import annotations

import pytest

from zerotune.tuner.advice import zero_formulas

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
    assert [[str(n), *cells.values()] for n, cells in zero_formulas.table_1()] == rows


def test_table_2() -> None:
    """The paper writes 512B, 1024B and 2048B as 0.5T, 1T and 2T."""
    rows = [[float(cell) for cell in line.split()] for line in TABLE_2.strip().splitlines()]
    assert [[mp, gpus, *sizes] for mp, gpus, sizes in zero_formulas.table_2()] == rows


@pytest.mark.parametrize(("stage", "gb"), [(0, 112.0), (1, 63.0), (2, 38.5), (3, 14.0)])
def test_seven_billion_in_fp32_on_eight_ranks(stage: int, gb: float) -> None:
    assert zero_formulas.model_states(7e9, stage, 8, precision="fp32").total_bytes == gb * 1e9


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
    assert zero_formulas.optimizer_multiplier(optimizer, precision) == k


def test_a_trillion_parameters_on_1024_ranks_take_16_gb() -> None:
    assert zero_formulas.model_states(1e12, 3, 1024).total_bytes == pytest.approx(15.625e9)


def test_traffic() -> None:
    assert [zero_formulas.sent_elements(100, s) for s in (0, 1, 2, 3)] == [200, 200, 200, 300]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="stage is 4"):
        zero_formulas.model_states(1, 4, 1)
    with pytest.raises(ValueError, match="optimizer is 'magic'"):
        zero_formulas.optimizer_multiplier("magic")
    with pytest.raises(ValueError, match="0"):
        zero_formulas.model_states(1, 1, 0)
