"""Runs of which only the algorithm is known: recorded, shown and compared as a whole, and never asked for."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from import_runs import command
from typer.testing import CliRunner

from zerotune.agent.nccl.catalog import candidates
from zerotune.store.errors import PlanError, WireError
from zerotune.store.plan_file import read_plan
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol
from zerotune.store.sqlite.database import MEASUREMENT, UNKNOWN, Store
from zerotune.store.sqlite.rows.measurements import well_formed
from zerotune.store.sqlite.rows.runnable import only_protocol, with_only_protocols
from zerotune.store.wire import PlanOffer, decode_daemon, encode
from zerotune.tuner.cli.app import app
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.correction.training_set import build
from zerotune.tuner.modeling.cost_prior import CostPrior
from zerotune.tuner.modeling.statistics import statistics
from zerotune.tuner.offline.choice_table import choice_table
from zerotune.tuner.offline.replay import replay
from zerotune.tuner.offline.replay.policies import POLICIES

TREE = Candidate(Algorithm.tree)
PLACE = CommunicatorClass(2, 1)
SIZES = [1 << exponent for exponent in range(14, 22)]
RAN = st.builds(
    Candidate, st.sampled_from(Algorithm), st.none() | st.sampled_from(Protocol), st.integers(min_value=0, max_value=64)
)
HEADER = (
    "# nccl-tests version 2.19.6\n# Collective test starting: {}_perf\n# nThread 1 nGpus 1\n"
    "#  Rank  0 Group  0 Pid 1 on node1 device  0 [0000:1b:00] X\n"
    "#  Rank  1 Group  0 Pid 2 on node1 device  1 [0000:1c:00] X\n"
)
COLUMNS = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong\n"
)
SIDE = "{us:8.2f} {gbs:7.2f} {gbs:7.2f}       0"
ROW = "{:>12}  {:>12}     float     sum      -1 " + SIDE + " " + SIDE + "\n"


def log(path: Path, per_mib_us: float, *, environment: str = "", collective: str = "all_reduce") -> Path:
    times_us = [(size, 20 + per_mib_us * size / 2**20) for size in SIZES]
    rows = "".join(ROW.format(size, size // 4, us=us, gbs=size / us / 1e3) for size, us in times_us)
    path.write_text(HEADER.format(collective) + environment + COLUMNS + rows + "# Out of bounds values : 0 OK\n")
    return path


@given(st.sampled_from(Collective), RAN)
def test_a_protocol_is_filled_in_where_no_other_can_have_run(collective: Collective, ran: Candidate):
    rows = np.zeros(1, MEASUREMENT)
    protocol = UNKNOWN if ran.protocol is None else int(ran.protocol)
    rows["collective"], rows["algorithm"], rows["protocol"] = collective, ran.algorithm, protocol
    rows["n_ranks"], rows["n_nodes"], rows["message_bytes"], rows["duration_us"] = 8, 1, 1024, 1.0
    assert well_formed(rows).all()
    assert ran.algorithm is not None
    only = only_protocol(collective, ran.algorithm)
    lacks = with_only_protocols(rows).tolist()
    assert lacks == [ran.lacks_protocol and only is None]
    if ran.lacks_protocol and only is not None:
        assert rows["protocol"].tolist() == [only]


def test_it_is_nothing_that_can_be_asked_for(tmp_path: Path):
    with pytest.raises(ValueError, match="algorithm"):
        Candidate(protocol=Protocol.ll)
    with pytest.raises(ValueError, match="tree/any"):
        PlanRow(PLACE, Collective.all_reduce, Phase.other, 1, 2, TREE)
    whole = Candidate(Algorithm.tree, Protocol.ll)
    header, body = encode(PlanOffer("j", Plan(1, (PlanRow(PLACE, Collective.all_reduce, Phase.other, 1, 2, whole),))))
    offer = msgspec.msgpack.decode(body)
    del offer["plan"]["rows"][0]["candidate"]["protocol"]
    with pytest.raises(WireError):
        decode_daemon([header, msgspec.msgpack.encode(offer)])
    row = {"n_ranks": 2, "n_nodes": 1, "collective": "all_reduce", "phase": "other", "min_bytes": 1, "max_bytes": 2}
    (tmp_path / "plan.json").write_text(json.dumps({"zerotune_plan": 1, "rows": [row | {"algorithm": "tree"}]}))
    with pytest.raises(PlanError, match="tree/any"):
        read_plan(tmp_path / "plan.json")
    assert not any(one.lacks_protocol for kind in Collective for one in candidates(kind, PLACE, 8))


@pytest.fixture
def store_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """NCCL's own choice, tree under an unknown protocol (faster), ring/ll (slower), as a user imports their logs."""
    path = tmp_path / "store.db"
    for name, per_mib_us, words in (
        ("own", 100, ["--default"]), ("tree", 50, ["--setting", "tree"]), ("ring", 150, ["--setting", "ring/ll"]),
    ):  # fmt: skip
        words = [*words, "--fabric-id", "boxes", "--store", path]
        code, out, _ = command(monkeypatch, capsys, log(tmp_path / f"{name}.log", per_mib_us), *words, "--json")
        assert code == 0
        assert json.loads(out)["n_measurements"] == 2 * len(SIZES)
        assert bool(json.loads(out)["notes"]) == (name == "tree"), "it is said what these are good for"
    return path


def test_an_imported_run_is_replayed_and_shown(store_path: Path, tmp_path: Path):
    table = tmp_path / "m.csv"
    done = CliRunner().invoke(app, ["store", "export", str(table), "--to", "measurements", "--store", str(store_path)])
    assert done.exit_code == 0, done.output
    result = replay(table, list(POLICIES))
    by_policy = {total.policy: total for total in result.totals}
    n_rows = 6 * len(SIZES)
    assert by_policy["baseline"].n_judged == n_rows
    settings: dict[str, set[str]] = {}
    for one in result.verdicts:
        settings.setdefault(one.policy, set()).add(one.setting)
    assert settings["oracle"] == {str(TREE)}, "in hindsight it was the best"
    assert by_policy["oracle"].gain_percent > 20
    for name, named in settings.items():
        assert name == "oracle" or not any(str(TREE) in one for one in named), f"{name} asks for what nobody can"


def test_nothing_is_learned_or_chosen_from_it(store_path: Path):
    with Store.open(store_path, read_only=True) as store:
        rows, lines = store.measurements(fabric_id="boxes"), statistics(store, "boxes")
        knowledge = Knowledge.from_store(store, "boxes")
    assert {line.candidate for line in lines} == {Candidate(), TREE, Candidate(Algorithm.ring, Protocol.ll)}
    points = build(rows, CostPrior({}))
    assert Algorithm.tree not in points.algorithm
    for key in {line.key for line in lines}:
        assert knowledge.decided(key) is None
        assert knowledge.promising(key) is None
    assert not knowledge.knows_of(Collective.all_reduce, Candidate(Algorithm.tree, Protocol.ll))
    table = choice_table(store_path, None, [1], SIZES, [Collective.all_reduce])
    assert {one.ground.value for one in table.entries} == {"nccl"}
    assert all(str(TREE) in one.reason for one in table.entries), "the user is told that there is something to gain"
