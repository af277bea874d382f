"""NCCL_ALGO and NCCL_PROTO: what they leave to the collectives of sharded training."""

import pytest

from zerotune.agent.launch import LaunchRequest, check
from zerotune.agent.nccl.pinning import unserved
from zerotune.store.errors import UserError


@pytest.mark.parametrize(
    ("algo", "proto", "lost"),
    [
        ("", "", []),
        ("Tree", "", ["all_gather", "reduce_scatter"]),
        ("Tree,Ring", "", []),
        ("^Ring", "", ["reduce_scatter"]),  # averages have no PAT and no NVLS
        ("ring;allreduce:tree", "", []),
        ("allgather:tree", "", ["all_gather"]),
        ("PAT", "LL", ["all_gather", "reduce_scatter", "all_reduce"]),
        ("NVLS", "", ["reduce_scatter"]),
        ("", "^LL,LL128", []),
        ("Ring", "LL128", []),
    ],
)
def test_pinned_variables_leave_these_collectives_untuned(algo: str, proto: str, lost: list[str]):
    assert [one.name for one in unserved({"NCCL_ALGO": algo, "NCCL_PROTO": proto})] == lost


def test_a_name_that_does_not_exist():
    with pytest.raises(UserError, match="Treee"):
        unserved({"NCCL_ALGO": "Treee"})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("Tree", "all_gather and reduce_scatter"),
        ("Ring", "NCCL_ALGO=Ring pins"),
        ("Treee", "unknown algorithm 'Treee'"),
    ],
)
def test_launch_warns_in_one_line_and_does_not_refuse(value: str, words: str):
    request = LaunchRequest(["true"], environment={"NCCL_ALGO": value, "PATH": "/usr/bin:/bin"})
    about = [one for one in check(request, daemon_answers=True) if "NCCL_ALGO" in str(one)]
    assert [one.fatal for one in about] == [False]
    assert words in str(about[0])
    assert "unset NCCL_ALGO" in str(about[0])
