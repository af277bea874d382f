"""Chunk sizes on an emulated fabric whose file says what they change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from emulated_pair import MIB, Pair, group, issue, plugin_with

from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.nccl.emulated.errors import SettingDisagreement
from zerotune.agent.nccl.fabric_file import ChunkEffect
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Protocol

SHAPE = CommunicatorClass(2, 2)
OWN = Candidate(Algorithm.ring, Protocol.simple, 2)
CHUNKED = msgspec.structs.replace(OWN, chunk_bytes=65536)
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


def test_what_they_change_has_no_part_in_the_fabrics_id(fabric: str):
    plain = fabrics.load(str(Path(fabric).parent / "plain" / "chunked.toml"))
    assert fabrics.load(fabric).fabric_id == plain.fabric_id
    assert not plain.chunks


@pytest.mark.parametrize(("version", "asks"), [("2.30.7", True), ("2.30.7", False), ("2.28.9", True)])
def test_a_plans_chunk_size_runs_where_nccl_asks(pair: Pair, fabric: str, version: str, asks: bool):
    with plugin_with({Collective.all_gather: CHUNKED, Collective.reduce_scatter: OWN}, SHAPE) as plugin:
        plugin.ask_chunk_sizes(asks)
        where = {"NCCL_TUNER_PLUGIN": str(plugin.path), "ZEROTUNE_NCCL_VERSION": version}
        ranks = pair(fabric, **where)
        plugin.set_recording(True)
        call = issue(ranks, Collective.all_gather, MIB)
        is_chunked = asks and version == "2.30.7"
        assert call.candidate == (CHUNKED if is_chunked else OWN)
        assert {int(one["chunk_bytes"]) for one in plugin.drain()} == {65536 if is_chunked else 0}
        assert issue(ranks, Collective.reduce_scatter, MIB).candidate == OWN
        both = group(ranks, [(Collective.all_gather, MIB), (Collective.reduce_scatter, MIB)])
        assert {one.candidate for one in both} == {call.candidate, OWN}
        truth_us = fabrics.load(fabric).truth_us(SHAPE, Collective.all_gather, OWN.algorithm, OWN.protocol, 2, MIB)
        shown = call.duration_us / truth_us
        assert abs(shown / (0.8 if is_chunked else 1.0) - 1) < 0.15, "but for noise"


def test_ranks_that_differ_would_hang(pair: Pair, fabric: str, monkeypatch: pytest.MonkeyPatch):
    ranks = pair(fabric)
    monkeypatch.setattr(ranks[1]._plugins, "chunk_bytes", lambda *_: 65536)
    with pytest.raises(SettingDisagreement, match="64KiB"):
        issue(ranks, Collective.all_gather, MIB)


def test_effects_by_size():
    effect = msgspec.toml.decode(CHUNKS, type=dict[str, tuple[ChunkEffect, ...]])["chunks"][0]
    sizes = {0: 1.0, 4096: 0.8, 65536: 0.8, 98304: 0.95, 131072: 1.1, 2**22: 1.1}
    for chunk_bytes, factor in sizes.items():
        setting = msgspec.structs.replace(OWN, chunk_bytes=chunk_bytes)
        assert effect.us_factor(SHAPE, setting) == pytest.approx(factor)
        assert effect.us_factor(CommunicatorClass(2, 1), setting) == 1.0
        assert effect.us_factor(SHAPE, msgspec.structs.replace(setting, protocol=Protocol.ll)) == 1.0
