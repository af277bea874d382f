"""What a job that began now would run: NCCL's choice, unless earlier jobs on the fabric know better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_material import FABRIC, FAST, SIZES, make_store
from typer.testing import CliRunner

from zerotune.agent.nccl import cost_model
from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.records import Collective, CommunicatorClass
from zerotune.store.sqlite.database import Store
from zerotune.tuner.cli.app import app
from zerotune.tuner.offline.choice_table import Ground, choice_table

GATHER = [Collective.all_gather]


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["predict", *map(str, words)], env={"COLUMNS": "200"})
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
def test_proven_settings_are_shown_at_measured_sizes(tmp_path: Path, fabric: str | None):
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


def test_a_rank_alone_sends_nothing(tmp_path: Path):
    where = ("--store", tmp_path / "none.db", "--fabric", "ethernet_boxes")  # boxes of one rank
    code, shown = run(*where, "--sizes", "1M", "--json")
    assert (code, min(one["n_ranks"] for one in json.loads(shown)["entries"])) == (0, 2)
    code, shown = run(*where, "--nodes", "1")
    assert (code, "--ranks-per-node" in shown) == (1, True)


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
