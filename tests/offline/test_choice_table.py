"""What a job that began now would run: NCCL's choice, unless earlier jobs on the fabric know better."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from report_material import FABRIC, FAST, SIZES, make_store
from typer.testing import CliRunner

from zerotune.agent.nccl import cost_model
from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.records import Collective, CommunicatorClass, size_class
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.tuner.cli.app import app
from zerotune.tuner.offline.choice_table import Ground, choice_table

GATHER = [Collective.all_gather]


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["table", *map(str, words)], env={"COLUMNS": "200"})
    return done.exit_code, done.output + str(done.exception or "")


def test_without_any_job_it_is_nccls_choice(tmp_path: Path):
    wanted = [Collective.all_gather, Collective.all_reduce]
    nodes, sizes = [1, 2, 4], [1 << 14, 1 << 20, 1 << 28]
    found = choice_table(tmp_path / "none.db", "h100_ib_16", nodes, sizes, wanted)
    assert (found.n_keys, found.ranks_per_node, len(found.notes)) == (0, 8, 1)
    asked = [(one.collective, one.n_nodes, one.message_bytes) for one in found.entries]
    assert asked == [(collective.name, n_nodes, size) for collective in wanted for n_nodes in nodes for size in sizes]
    described = fabrics.load("h100_ib_16")
    for one in found.entries:
        topology = described.topology(CommunicatorClass(one.n_ranks, one.n_nodes))
        choice = cost_model.default_choice(topology, Collective[one.collective], one.message_bytes)
        assert (one.setting, one.ground, one.is_measured) == (str(choice), Ground.nccl, False)
        assert one.expected_us == one.nccl_us
        assert one.cheapest_us is not None
        assert one.nccl_us is not None
        assert one.cheapest_us <= one.nccl_us
    assert len({one.setting for one in found.entries}) > 2


@pytest.mark.parametrize("fabric", [None, FABRIC])
def test_what_earlier_jobs_proved_runs_where_they_measured_it(tmp_path: Path, fabric: str | None):
    store = make_store(tmp_path / "s.db")
    found = choice_table(store, fabric, [2, 4], [*SIZES, 1 << 28], GATHER)
    assert found.ranks_per_node == 1
    assert {one.phase for one in found.entries} == {"forward_gather", "backward_gather"}
    for one in found.entries:
        is_proven = one.n_nodes == 2 and one.message_bytes in SIZES[:2]
        assert (one.ground is Ground.proven) == is_proven
        assert (one.setting == str(FAST) and one.is_measured) == is_proven
        if is_proven:
            assert one.expected_us is not None
            assert one.nccl_us is not None
            assert one.expected_us / one.nccl_us == pytest.approx(0.7, abs=0.05)
    code, shown = run("--store", store, "--nodes", "2", "--sizes", "1K:1M", "--collective", "all_gather")
    assert code == 0
    assert shown.count(f"{FAST} (proven)") == 2 * 2, "two sizes in two phases"


def test_without_sizes_those_that_were_measured_are_there(tmp_path: Path):
    store = make_store(tmp_path / "s.db")
    block = np.zeros(40, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"], block["collective"] = 2, 2, 793_088, 3
    block["algorithm"], block["protocol"], block["n_channels"], block["duration_us"] = 1, 2, 8, 50.0
    block["is_default"], block["step"] = 1, np.arange(40)
    with Store.open(store) as opened:
        opened.record_measurements(fabrics.load(FABRIC).fabric_id, opened.jobs()[-1].job_id, block)
        opened.flush()
    code, shown = run("--store", store, "--nodes", "2", "--json")
    entries = json.loads(shown)["entries"]
    assert code == 0
    measured = [one["message_bytes"] for one in entries if one["is_measured"] and one["collective"] == "reduce_scatter"]
    assert size_class(793_088) in [size_class(size) for size in measured]
    assert {1 << 10, 1 << 20, 1 << 30} <= {one["message_bytes"] for one in entries}


def test_one_node_that_describes_no_network_is_shown_alone(tmp_path: Path):
    code, shown = run("--store", tmp_path / "none.db", "--fabric", "few_sms_node", "--json")
    assert (code, {one["n_nodes"] for one in json.loads(shown)["entries"]}) == (0, {1})


def test_a_rank_alone_sends_nothing(tmp_path: Path):
    where = ("--store", tmp_path / "none.db", "--fabric", "ethernet_boxes")  # boxes of one rank
    code, shown = run(*where, "--sizes", "1M", "--json")
    assert (code, min(one["n_ranks"] for one in json.loads(shown)["entries"])) == (0, 2)
    code, shown = run(*where, "--nodes", "1")
    assert (code, "--ranks-per-node" in shown) == (1, True)


def test_what_is_not_proved_leads(tmp_path: Path):
    """Few calls, faster by little more than their noise."""
    block = np.zeros(26, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"], block["collective"] = 2, 2, 1 << 20, 2
    block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 8
    block["duration_us"] = 1000 * (1 + 0.1 * (-1.0) ** np.arange(26))
    block["is_default"], block["step"] = 1, np.arange(26)
    block["protocol"][20:], block["is_default"][20:] = FAST.protocol, 0
    block["duration_us"][20:] *= 0.92
    with Store.open(tmp_path / "s.db") as store:
        described = fabrics.load(FABRIC)
        store.record_job("job", described.fabric_id, described.describe(), 2)
        store.record_measurements(described.fabric_id, "job", block)
        store.flush()
    (one,) = choice_table(tmp_path / "s.db", None, [2], [1 << 20], GATHER).entries
    assert (one.setting, one.ground, one.is_measured) == (str(FAST), Ground.leads, True)


def test_more_nodes_than_the_file_describes_are_said(tmp_path: Path):
    described = fabrics.load("h100_ib_2")
    for nodes, n_notes in (([described.max_nodes], 1), ([described.max_nodes, 64], 2)):
        found = choice_table(tmp_path / "none.db", "h100_ib_2", nodes, [1 << 20], GATHER)
        assert len(found.notes) == n_notes
        assert all(one.nccl_us for one in found.entries)


def test_a_machine_that_nobody_described(tmp_path: Path):
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("job", "fabric", {}, 2)
        store.flush()
    code, shown = run("--store", tmp_path / "s.db")
    assert (code, "--ranks-per-node" in shown) == (1, True)
    code, shown = run("--store", tmp_path / "s.db", "--ranks-per-node", 4, "--nodes", "1,2", "--sizes", "1M", "--json")
    entries = json.loads(shown)["entries"]
    assert {one["setting"] for one in entries} == {"baseline"}
    assert [one["n_ranks"] for one in entries] == [4, 8] * 3


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1K:8K", [1024, 2048, 4096, 8192]), ("1K:3000", [1024, 2048]), ("1M,64K,64K", [65536, 1 << 20]), ("7", [7])],
)
def test_sizes_as_people_write_them(tmp_path: Path, text: str, sizes: list[int]):
    words = ["--fabric", "h100_node", "--nodes", "1", "--collective", "AllGather", "--store", tmp_path / "none.db"]
    code, shown = run(*words, "--sizes", text, "--json")
    assert code == 0
    assert [one["message_bytes"] for one in json.loads(shown)["entries"]] == sizes
