"""`zerotune doctor --nodes`: nodes compared by what each of them answers through a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerotune.store.errors import UserError
from zerotune.tuner.doctor import asking
from zerotune.tuner.doctor.asking import Asked, ask
from zerotune.tuner.doctor.comparing import compare
from zerotune.tuner.doctor.findings import Finding, Status
from zerotune.tuner.doctor.node import Fact

DOCTOR = [sys.executable, "-m", "zerotune.tuner.cli", "doctor", "--nodes", "--json", "--store"]
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def launcher(folder: Path, body: str) -> list[str]:
    path = folder / "launcher"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return [str(path)]


def answer(node: str, *facts: tuple[str, str, str], n_facts: int | None = None) -> list[Fact]:
    end = Fact(node, node, "end", "", str(len(facts) if n_facts is None else n_facts))
    return [Fact(node, node, "start", "", ""), *(Fact(node, node, *fact) for fact in facts), end]


def compared(*answers: list[Fact], failure: str = "", missing: tuple[str, ...] = ()) -> list[Finding]:
    return compare(Asked(tuple(fact for one in answers for fact in one), failure, missing))


def test_two_nodes_with_unequal_variables(tmp_path: Path) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("NCCL_")}
    body = "SLURMD_NODENAME=n1 NCCL_ALGO=Ring \"$@\" | sed 's/^/0: /'\nNCCL_SOCKET_IFNAME=lo SLURMD_NODENAME=n2 \"$@\""
    done = subprocess.run(
        [*DOCTOR, str(tmp_path / "s"), "--", *launcher(tmp_path, body)],
        env=environment | {"SLURM_JOB_NODELIST": "n[1-3]"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = {(one["code"], one["found"]): one["status"] for one in json.loads(done.stdout)["checks"]}
    assert found["answers", "2 nodes: n1 n2"] == "ok"
    assert found["answers", "nothing came from nodes of this allocation: n3"] == "warning"
    assert found["variables", "NCCL_ALGO: Ring on n1; not set on n2"] == "problem"
    assert found["variables", "NCCL_SOCKET_IFNAME: not set on n1; lo on n2; this may be right"] == "ok"
    assert ("versions" in {code for code, _ in found}) is False, "they are the same machine"


@pytest.mark.parametrize(
    ("fact", "code", "status"),
    [
        (("version", "NCCL"), "versions", Status.problem),
        (("version", "zerotune"), "versions", Status.problem),
        (("version", "driver"), "versions", Status.warning),
        (("hardware", "GPUs"), "hardware", Status.warning),
        (("variable", "NCCL_PROTO"), "variables", Status.problem),
        (("variable", "NCCL_CROSS_NIC"), "variables", Status.warning),
        (("variable", "NCCL_IB_HCA"), "variables", Status.ok),
    ],
)
def test_a_difference_is_one_line_that_names_the_nodes(fact, code, status) -> None:
    nodes = [answer(f"n{at:02}", (*fact, "1" if at else "2")) for at in range(12)]
    _, found = compared(*nodes)
    assert (found.code, found.status) == (code, status)
    assert found.found.startswith(f"{fact[1]}: 1 on n01 n02 n03 n04 n05 n06 n07 n08 and 3 more; 2 on n00")
    assert len(compared(*nodes[1:])) == 1, "equal nodes: no difference"


def test_a_finding_of_several_nodes_is_told_once() -> None:
    trouble = ("finding", "acs", "it redirects", Status.warning, "turn it off")
    assert compared(answer("n2", trouble), answer("n1", trouble), answer("n3"))[1:] == [
        Finding("acs", Status.warning, "n1 n2: it redirects", "turn it off")
    ]


def test_answers_that_are_not_whole() -> None:
    def problems(*answers: list[Fact], **options: str) -> list[str]:
        return [one.found for one in compared(*answers, **options) if one.status is Status.problem]

    assert problems() == ["no node answered"]
    assert problems(answer("n1"), answer("n2")[:1], answer("n3", n_facts=3)) == ["no whole answer of n2 n3"]
    assert problems(answer("n1"), failure="ended with status 127: n2: not found")[0].endswith("n2: not found")
    same_node = [Fact("b", "n1", "start", "", ""), Fact("b", "n1", "end", "", "0")]
    assert compared(answer("n1"), same_node)[0].found == "2 nodes: n1 n1#2"


def test_lines_that_are_no_facts_are_left_out(tmp_path: Path) -> None:
    good = '{"answer":"a","node":"n\\u001b[31m","kind":"start","name":"","value":""}'
    lines = ["motd", '{"answer":1}', '{"answer":"a"', good.replace("start", "command"), "9" * 9000 + good, good]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n\\xff")
    body = f"cat {tmp_path}/lines; head -c 100000 /dev/zero; echo; cat {tmp_path}/lines"
    asked = ask(launcher(tmp_path, body), [], {}, 60)
    assert [one.node for one in asked.facts] == ["n\\u001b[31m"] * 2
    assert asked.failure == ""


def test_a_launcher_that_fails_hangs_or_never_stops_writing(tmp_path: Path, monkeypatch) -> None:
    failed = ask(launcher(tmp_path, "echo 'n7: \033[31m no zerotune' >&2; exit 3"), [], {}, 60).failure
    assert failed == "the launcher ended with status 3: n7: \\u001b[31m no zerotune"
    with pytest.raises(UserError, match="no-such-launcher"):
        ask(["no-such-launcher"], [], {}, 60)
    monkeypatch.setattr(asking, "GRACE_S", 0.3)
    monkeypatch.setattr(asking, "MAX_BYTES", 1000)
    begin_s = time.monotonic()
    for body in ("trap '' TERM; sleep 60 & wait; sleep 60", "while :; do echo; done", "exec cat /dev/zero >&2"):
        assert "did not end within 0.5 s" in ask(launcher(tmp_path, body), [], dict(os.environ), 0.5).failure
    assert time.monotonic() - begin_s < 20


@pytest.mark.parametrize(
    ("listed", "nodes"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[08-10,3],login", ["n08", "n09", "n10", "n3", "login"]),
        ("r[1-2]c[1-2]", []),
        ("n[x", ["n", "x"]),
    ],
)
def test_nodes_of_an_allocation(listed, nodes) -> None:
    assert asking._allocated({"SLURM_JOB_NODELIST": listed}) == nodes


def test_an_answer_is_short_lines(tmp_path: Path) -> None:
    environment = os.environ | {"NCCL_IB_HCA": 999 * "x", "SLURMD_NODENAME": "n1", "NCCL_ALGO": "magic"}
    done = subprocess.run(  # 0 despite a problem
        [*DOCTOR, str(tmp_path / "s")], env=environment, capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert max(map(len, done.stdout.splitlines())) < 1024
    assert ({one["node"] for one in lines}, len({one["answer"] for one in lines})) == ({"n1"}, 1)
    assert (lines[0]["kind"], lines[-1]["kind"], lines[-1]["value"]) == ("start", "end", str(len(lines) - 2))
