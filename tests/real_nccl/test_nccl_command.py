"""`zerotune predict` over the real library."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from zerotune.agent.nccl.twin import twin
from zerotune.agent.nccl.twin.protocol import Question
from zerotune.store.plan_file import PlanFile, write_plan
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol
from zerotune.tuner import cli

HERE = CommunicatorClass(2, 1)


@pytest.fixture
def nccl(monkeypatch, capsys):
    """The command, which asks NCCL in processes of its own."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["zerotune", "predict", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return subprocess.CompletedProcess(sys.argv, left.value.code or 0, *capsys.readouterr())

    return run


def row(algorithm, protocol, n_channels=0, *, communicator=HERE, max_bytes=1 << 24):
    candidate = Candidate(algorithm, protocol, n_channels)
    return PlanRow(communicator, Collective.all_gather, Phase.forward_gather, 1 << 20, max_bytes, candidate)


@pytest.fixture
def judged(nccl, newest, tmp_path):
    """The exit code for a plan of these rows, and what is said of each."""

    def run(*rows):
        path = tmp_path / "plan.json"
        write_plan(path, PlanFile(Plan(epoch=1, rows=rows)))
        done = nccl("dgx_h100", "--ranks-per-node", 2, "--library", newest[1], "--plan", path, "--json")
        return done.returncode, {one["row"]: one for one in json.loads(done.stdout)}

    return run


def test_choices_and_a_picture(nccl, newest, tmp_path):
    version, library = newest
    options = ("--ranks-per-node", 2, "--library", library, "--sizes", "64K:64M")
    done = nccl("dgx_h100", *options, "--picture", tmp_path / "choices.png", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nccl"] == ".".join(map(str, version))
    assert (tmp_path / "choices.png").read_bytes().startswith(b"\x89PNG")
    gathers = [choice for choice in found["choices"] if choice["collective"] == "all_gather"]
    assert [choice["message_bytes"] for choice in gathers] == [1 << shift for shift in range(16, 27)]
    for choice in gathers:
        cheapest = min(choice["offers"], key=lambda offer: offer["estimate_us"])
        assert (choice["algorithm"], choice["protocol"]) == (cheapest["algorithm"], cheapest["protocol"])
        assert choice["estimate_us"] == cheapest["estimate_us"]
    assert all(before["estimate_us"] < after["estimate_us"] for before, after in pairwise(gathers))
    assert all(1 <= choice["n_channels"] <= found["max_channels"] for choice in gathers)


def test_settings_that_nccl_lists_but_never_chooses_are_not_offered(nccl, newest):
    _, library = newest
    options = ("--nodes", 2, "--ranks-per-node", 2, "--library", library, "--sizes", "1M")
    done = nccl("dgx_h100", *options, "--json")
    assert done.returncode == 0, done.stderr
    for choice in json.loads(done.stdout)["choices"]:
        assert all(offer["estimate_us"] < 1e6 for offer in choice["offers"])


def test_rows_of_a_plan_that_do_nothing_are_told(judged):
    elsewhere = row(Algorithm.ring, Protocol.ll, communicator=CommunicatorClass(16, 2))
    code, rows = judged(row(Algorithm.ring, Protocol.ll128, 4), elsewhere)
    assert code == 1
    assert {number: one["effect"] for number, one in rows.items()} == {1: "applies", 2: "never_matches"}


def test_a_plan_whose_rows_all_apply_is_a_success(judged):
    code, rows = judged(row(Algorithm.ring, Protocol.ll128, 4))
    assert (code, rows[1]["effect"], rows[1]["ran"]) == (0, "applies", "ring/ll128/4ch")


def test_a_row_that_nccl_does_not_offer_is_called_ignored(judged):
    code, rows = judged(row(Algorithm.pat, Protocol.simple))
    assert (code, rows[1]["effect"]) == (1, "ignored")


def test_another_release_against_itself_changes_nothing(nccl, newest):
    _, library = newest
    options = ("--ranks-per-node", 2, "--library", library, "--sizes", "1M")
    done = nccl("dgx_h100", *options, "--against", library, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["before"], found["changes"]) == (found["after"], [])


def test_an_answer_that_is_there_before_anybody_looks_is_read(newest, monkeypatch):
    """On a busy machine a node's id and its answer may come together."""
    _, library = newest
    first = []

    def late(*arguments):
        if not first:
            first.append(True)
            time.sleep(2)
        return select(*arguments)

    select = twin.select.select
    monkeypatch.setattr(twin.select, "select", late)
    with twin.topology_file("dgx_h100") as topology:
        question = Question(Collective.all_gather, 1 << 20)
        answer = twin.ask_nccl(library, twin.Cluster(topology, 1, 2), [question], timeout_s=30)
    assert [each.question for each in answer.answers] == [question]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("nowhere",), "nowhere"),
        (("dgx_h100", "--ranks-per-node", 9), "9"),
        (("dgx_h100", "--ranks-per-node", 1), "1"),
        (("dgx_h100", "--collective", "all_to_all"), "all_to_all"),
        (("dgx_h100", "--sizes", "2M:1M"), "2M:1M"),
    ],
)
def test_mistakes_are_told_in_one_line(nccl, options, named, tmp_path):
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"not a library")
    done = nccl(*options, "--library", library)
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_no_library_is_refused(nccl, tmp_path):
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"not a library")
    done = nccl("dgx_h100", "--ranks-per-node", 2, "--library", library)
    assert done.returncode == 2
    assert str(library) in done.stderr
    assert "Traceback" not in done.stderr
