"""A full sweep that tries chunk sizes, on an emulated NCCL that asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.errors import UserError
from zerotune.store.records import Source
from zerotune.store.sqlite.database import Store
from zerotune.tuner.offline.sweep import SweepRequest, run_sweep

CHUNKS = """
[[chunks]]
protocol = "simple"
us_factors = [[65536, 0.5], [131072, 2.0]]
"""


@pytest.mark.slow
def test_each_chunk_size_is_a_setting_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fabric, path = tmp_path / "chunked.toml", tmp_path / "s.db"
    plain = Path(fabrics.__file__).parent / "fabrics" / "ethernet_boxes.toml"
    fabric.write_text(plain.read_text() + CHUNKS)
    request = SweepRequest(
        fabric=str(fabric), collectives=("all_gather",), min_bytes=1 << 20, max_bytes=1 << 20, full=True,
        max_repeats=6, chunk_sizes=(65536, 131072),
    )  # fmt: skip
    with pytest.raises(UserError, match="asks for no chunk sizes"):
        run_sweep(request, path, lambda *_: None)
    monkeypatch.setenv("ZEROTUNE_NCCL_VERSION", "2.30.7")
    result = run_sweep(request, path, lambda *_: None)
    best = next(row for row in result.rows if row.is_best)
    assert best.setting.endswith("/64KiB")
    by_setting = {row.setting: row.median_us for row in result.rows}
    own = best.setting.removesuffix("/64KiB")
    assert by_setting[best.setting] == pytest.approx(0.5 * by_setting[own], rel=0.2)
    assert by_setting[f"{own}/128KiB"] == pytest.approx(2 * by_setting[own], rel=0.2)
    with Store.open(path, read_only=True) as store:
        found = [store.measurements(source=Source.sweep, chunk_bytes=size) for size in (0, 65536, 131072)]
    n_own, n_small, n_large = map(len, found)
    assert n_own > n_small == n_large > 0
    again = run_sweep(request, path, lambda *_: None)
    assert (again.n_samples, again.n_restored) == (0, result.n_samples)
