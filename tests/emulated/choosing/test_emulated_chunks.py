"""Chunk sizes on an emulated fabric whose file says what they change."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_pair import MIB, Pair, issue

from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.nccl.emulated.errors import SettingDisagreement
from zerotune.store.records import Collective

CHUNKS = """
[[chunks]]
protocol = "simple"
us_factors = [[65536, 0.8], [131072, 1.1]]
spans = ["many_nodes"]
"""


@pytest.fixture
def fabric(tmp_path: Path) -> str:
    path = tmp_path / "chunked.toml"
    plain = Path(fabrics.__file__).parent / "fabrics" / "ethernet_boxes.toml"
    path.write_text(plain.read_text() + CHUNKS)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "chunked.toml").write_text(plain.read_text())
    return str(path)


def test_chunk_factors_do_not_change_a_fabrics_id(fabric: str):
    plain = fabrics.load(str(Path(fabric).parent / "plain" / "chunked.toml"))
    assert fabrics.load(fabric).fabric_id == plain.fabric_id
    assert not plain.chunks


def test_ranks_that_differ_would_hang(pair: Pair, fabric: str, monkeypatch: pytest.MonkeyPatch):
    ranks = pair(fabric)
    monkeypatch.setattr(ranks[1]._plugins, "chunk_bytes", lambda *_: 65536)
    with pytest.raises(SettingDisagreement, match="64KiB"):
        issue(ranks, Collective.all_gather, MIB)
