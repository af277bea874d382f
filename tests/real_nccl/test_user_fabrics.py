"""`zerotune hardware add` as a user calls it: a machine's topology file in, a rehearsal on its twin out."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from benchmarks.lib.free_port import free_port
from zerotune.agent.nccl.twin.machines import MACHINES
from zerotune.tuner import cli

ZEROTUNE = (sys.executable, "-m", "zerotune.tuner.cli")
JOB = Path(__file__).with_name("rehearsed_job.py")
RANKS = 2


class User:
    """Someone in an empty folder, with a dump of an H100 node."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.fabrics = folder / "data" / "zerotune" / "fabrics"
        self.dump = folder / "t.xml"
        self.dump.write_text(MACHINES["dgx_h100"].topology())
        self.environment = {
            "XDG_DATA_HOME": str(folder / "data"),
            "ZEROTUNE_RUNTIME_DIR": str(folder / "r"),
            "NCCL_LIBRARY": str(library),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *words):
        """Exit code, standard output and standard error of a command, in this process."""
        out, error = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
            patch.chdir(self.folder)
            for name, value in self.environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["zerotune", *map(str, words)])
            with pytest.raises(SystemExit) as left:
                cli.main()
        return left.value.code, out.getvalue(), error.getvalue()

    def json(self, *words):
        """What a command that succeeds prints."""
        code, text, error = self.run(*words, "--json")
        assert code == 0, error
        return json.loads(text)

    def refused(self, *words):
        """The one line that a refused command says."""
        code, _, error = self.run(*words)
        assert (code, error.count("\n")) == (2, 1), error
        return error

    def launch(self, *words):
        """The last line that a job prints."""
        done = subprocess.run(
            [*ZEROTUNE, "launch", *map(str, words)],
            capture_output=True, text=True, timeout=110, check=False,
            cwd=self.folder, env={**os.environ, **self.environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def user(newest, tmp_path_factory):
    return User(tmp_path_factory.mktemp("u"), newest[1])


@pytest.fixture(scope="module")
def added(user):
    return user.json("hardware", "add", "mine", "--topology", "t.xml", "--ranks-per-node", RANKS)


def test_a_fabric_is_exact_and_does_not_need_the_dump_any_more(user, added, newest):
    user.dump.unlink()
    assert (added["fabric"], added["nccl"]) == ("mine", ".".join(map(str, newest[0])))
    assert added["worst_relative_error"] < 1e-3
    assert user.json("hardware")["fabrics"]["mine"]["ranks_per_node"] == RANKS
    user.dump.write_text(MACHINES["dgx_h100"].topology())


@pytest.mark.slow
def test_a_rehearsal_decides_as_on_the_machine(user, added):
    torchrun = ("torch.distributed.run", f"--nproc-per-node={RANKS}", f"--master-port={free_port()}")
    command = (sys.executable, "-m", *torchrun, JOB)
    told = user.launch("--no-agent", "--fabric", "mine", "--", *command)
    ran = {tuple(call[:2]): call[2:] for call in json.loads(told)}
    options = ("--ranks-per-node", RANKS, "--sizes", "1MiB")
    chosen = user.json("predict", "dgx_h100", *options)["choices"]
    compared = [each for each in chosen if (each["collective"], each["message_bytes"]) in ran]
    assert {each["collective"] for each in compared} == {"all_gather", "all_reduce"}
    for each in compared:
        setting, duration_us = ran[each["collective"], each["message_bytes"]]
        assert setting[:2] == [each["algorithm"], each["protocol"]]  # the model may count other channels
        assert duration_us == pytest.approx(each["estimate_us"], rel=0.2)  # noise of the virtual clock


def test_several_nodes_and_removal(user, added):
    options = ("--topology", "t.xml", "--ranks-per-node", 1, "--nodes", 2, "--force")
    assert user.json("hardware", "add", "two", *options)["worst_relative_error"] < 1e-3
    assert user.json("hardware")["fabrics"]["two"]["max_nodes"] == 2
    assert user.json("hardware", "remove", "two") == {"removed": "two"}
    assert "two" not in user.json("hardware")["fabrics"]
    assert sorted(path.name for path in user.fabrics.iterdir()) == ["mine.toml", "mine.xml"]


def test_a_file_that_its_user_spoilt_does_not_hide_the_others(user, added):
    (user.fabrics / "spoilt.toml").write_text("title = 1")
    try:
        listed = user.json("hardware")["fabrics"]
        assert "ranks_per_node" in listed["mine"]
        assert "title" in listed["spoilt"]
        assert "ranks_per_node" not in listed["spoilt"]
    finally:
        (user.fabrics / "spoilt.toml").unlink()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("h100_node", "--topology", "t.xml"), "h100_node"),
        (("dgx_h100", "--topology", "t.xml"), "dgx_h100"),
        (("mine", "--topology", "t.xml"), "--force"),
        (("../mine", "--topology", "t.xml"), "../mine"),
        (("a.toml", "--topology", "t.xml"), "a.toml"),
        (("new", "--topology", "t.xml", "--nodes", 1000), "8000"),
        (("new", "--topology", "t.xml", "--ranks-per-node", 9), "9"),
        (("new", "--topology", "t.xml", "--ranks-per-node", 1), "--nodes"),
        (("new", "--topology", "absent.xml"), "absent.xml"),
        (("new", "--topology", "huge.xml"), "huge.xml"),
        (("new", "--topology", "no_gpu.xml"), "no_gpu.xml"),
        (("new", "--topology", "t.xml", "--library", "absent.so"), "absent.so"),
        (("new", "--topology", "t.xml", "--library", "t.xml"), "t.xml"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing(user, added, words, named):
    (user.folder / "no_gpu.xml").write_text('<system version="1"/>')
    with (user.folder / "huge.xml").open("wb") as file:
        file.truncate(1 << 30)
    assert named in user.refused("hardware", "add", *words)
    assert sorted(path.name for path in user.fabrics.iterdir()) == ["mine.toml", "mine.xml"]


@pytest.mark.parametrize("name", ["h100_node", "nobody", "../mine"])
def test_only_what_was_added_can_be_removed(user, added, name):
    assert name in user.refused("hardware", "remove", name)


def test_other_commands_know_the_name(user, added):
    assert "mine.xml" in user.refused("predict", "mine", "--ranks-per-node", 9)
