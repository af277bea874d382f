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
from zerotune.store.errors import PlanError, UserError, WireError
from zerotune.store.plan_file import read_plan
from zerotune.store.records import (
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    Plan,
    PlanRow,
    Protocol,
)
from zerotune.store.sqlite.database import MEASUREMENT, UNKNOWN, Store
from zerotune.store.sqlite.rows.measurements import candidate_of, well_formed
from zerotune.store.sqlite.rows.runnable import only_protocol, with_only_protocols
from zerotune.store.wire import PlanOffer, decode_daemon, encode
from zerotune.tuner.cli.app import app
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.correction.training_set import build
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.offline.choice_table import choice_table
from zerotune.tuner.offline.importing.command import parse_setting
from zerotune.tuner.offline.replay import replay
from zerotune.tuner.offline.replay.policies import POLICIES
from zerotune.tuner.traces import read_trace

SETTING = ("algorithm", "protocol", "n_channels")
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


def forced(variable: str, value: str) -> str:
    return f"node1:1:1 [0] NCCL INFO {variable} set by environment to {value}\n"


@given(RAN)
def test_what_ran_is_read_as_it_is_printed(ran: Candidate):
    found = parse_setting(str(ran))
    assert found.algorithm is ran.algorithm
    assert found.n_channels == ran.n_channels
    assert found.protocol is ran.protocol or ran.lacks_protocol, "one that NCCL has no other for is filled in"
    assert parse_setting(str(found)) == found


@given(RAN)
def test_what_ran_comes_back_from_the_stores_columns(ran: Candidate):
    protocol = UNKNOWN if ran.protocol is None else int(ran.protocol)
    assert candidate_of(int(ran.algorithm or 0), protocol, ran.n_channels) == ran


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


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("tree", TREE),
        ("TREE/any", TREE),
        ("tree/8ch", Candidate(Algorithm.tree, n_channels=8)),
        ("tree/any/8", Candidate(Algorithm.tree, n_channels=8)),
        ("nvls/any/8ch", Candidate(Algorithm.nvls, Protocol.simple, 8)),
    ],
)
def test_ways_to_leave_the_protocol_open(text: str, setting: Candidate):
    assert parse_setting(text) == setting


@pytest.mark.parametrize("text", ["ring/8", "any/ll", "any", "ring/any/8ch/1", "ring/any/65", "ring//8", "/ll"])
def test_what_is_no_setting_is_refused(text: str):
    with pytest.raises(UserError):
        parse_setting(text)


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        (forced("NCCL_ALGO", "Tree"), TREE),
        (forced("NCCL_ALGO", "Tree") + forced("NCCL_PROTO", "LL"), Candidate(Algorithm.tree, Protocol.ll)),
        (forced("NCCL_ALGO", "Tree") + forced("NCCL_PROTO", "LL,LL128"), TREE),
        (forced("NCCL_ALGO", "NVLS"), Candidate(Algorithm.nvls, Protocol.simple)),
        (forced("NCCL_ALGO", "ring;allreduce:tree;allgather:ring"), TREE),
        (forced("NCCL_ALGO", "allgather:ring"), None),
        (forced("NCCL_ALGO", "Ring,Tree"), None),
        (forced("NCCL_PROTO", "LL"), None),
    ],
)
def test_a_log_that_tells_the_algorithm_is_believed(tmp_path: Path, environment: str, setting: Candidate | None):
    blocks = list(read_trace(log(tmp_path / "t.log", 50, environment=environment)).measurements())
    rows = [one for block in blocks for one in block]
    assert {candidate_of(*(int(one[name]) for name in SETTING)) for one in rows} == ({setting} - {None})
    assert not any(one["is_default"] for one in rows)


def test_the_option_completes_what_the_file_tells(tmp_path: Path):
    path = log(tmp_path / "t.log", 50, environment=forced("NCCL_ALGO", "Tree"))
    for said, protocol in (("tree/ll", Protocol.ll), ("ring/ll", UNKNOWN)):
        (rows,) = read_trace(path).measurements(setting=parse_setting(said))
        assert set(rows["algorithm"]) == {Algorithm.tree}, "the file goes before the options"
        assert set(rows["protocol"]) == {protocol}


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
    done = CliRunner().invoke(app, ["export", str(table), "--to", "measurements", "--store", str(store_path)])
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
        rows, lines = store.measurements(fabric_id="boxes"), store.statistics("boxes")
        knowledge = Knowledge.from_store(store, "boxes")
    assert {line.candidate for line in lines} == {Candidate(), TREE, Candidate(Algorithm.ring, Protocol.ll)}
    points = build(rows, CostPrior({}))
    assert Algorithm.tree not in points.algorithm
    for key in {line.key for line in lines}:
        assert knowledge.decided(key) is None
        assert knowledge.open_lead(key) is None
    assert not knowledge.knows_of(Collective.all_reduce, Candidate(Algorithm.tree, Protocol.ll))
    table = choice_table(store_path, None, [1], SIZES, [Collective.all_reduce])
    assert {one.ground.value for one in table.entries} == {"nccl"}
    assert all(str(TREE) in one.reason for one in table.entries), "the user is told that there is something to gain"


def test_an_imported_count_of_channels_alone_stops_no_later_job(tmp_path: Path, monkeypatch, capsys):
    """Its row is of no setting on offer; the jobs on that fabric go on learning from all others."""
    head = "job_id,fabric_id,n_ranks,n_nodes,collective,message_bytes,algorithm,protocol,n_channels,duration_us"
    rows = [f"j,boxes,2,1,all_gather,200000,{setting},100" for setting in (",,5", "ring,ll,3", "ring,ll,4") * 4]
    (file := tmp_path / "m.csv").write_text("\n".join([head, *rows]) + "\n")
    assert command(monkeypatch, capsys, file, "--store", tmp_path / "store.db")[0] == 0
    with Store.open(tmp_path / "store.db", read_only=True) as store:
        lines, knowledge = store.statistics("boxes"), Knowledge.from_store(store, "boxes")
    assert Candidate(n_channels=5) in {line.candidate for line in lines}
    costs, (key,) = CostPrior({"comm_channels": 8}), {line.key for line in lines}
    offered = costs.candidates(key.communicator, key.collective)
    mean, _ = knowledge.prior(key, 200_000, offered, costs)
    measured = [str(one) for one, log_us in zip(offered, mean, strict=True) if np.exp(log_us) == pytest.approx(100)]
    assert measured == ["ring/ll/4ch"]
