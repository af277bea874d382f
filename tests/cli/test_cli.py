"""The command line as a user meets it: tables, mistakes, exit codes."""

import json
import subprocess
import sys
import time

import pytest

from zerotune.store.sqlite.database import Store


def zerotune(*words, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "zerotune.tuner.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
    )


def refused(done, *words):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("zerotune: ")
    for word in words:
        assert word in done.stderr


def test_help_is_quick_and_lists_every_command():
    began = time.monotonic()
    done = zerotune("--help")
    assert time.monotonic() - began < 5  # a smoke alarm only: 0.3 s is measured in benchmarks
    for command in ("daemon", "launch", "status", "explain", "replay", "sweep", "import", "memory", "report"):
        assert command in done.stdout


def test_paper_tables():
    done = zerotune("memory")
    assert "31.4" in done.stdout
    assert "230.4" in done.stdout
    assert "1.88 GB" in zerotune("memory", "--model", "7.5B", "--ranks", "64").stdout


def test_memory_of_a_file_shows_its_parameters(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(
        '{"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}'
    )
    assert "1.56 billion" in " ".join(zerotune("memory", "--model", str(path)).stdout.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("memory", "--model", "7B", "--precision", "int3"), "int3"),
        (("memory", "--overlap", "--model", "7B"), "--overlap"),
        (("sweep", "--full", "--budget", "0.5"), "--budget"),
        (("sweep", "--compare", "a", "b", "--store", "/nowhere/s.db"), "/nowhere/s.db"),
        (("launch", "--fabric", "nope", "--", sys.executable, "-c", "0"), "nope"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words, named):
    # Three through the real script; tests/cli/test_every_command.py has all in process.
    refused(zerotune(*words), named)


CSV = """\
collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,\
cost_metric,bandwidth_gbps,latency_us
allgather,1048576,ring,simple,4,2,16,1,0,0,0,120.5
allgather,1048576,default,default,0,2,16,1,0,0,0,150.5
"""


def test_import_records_what_the_dry_run_announces(tmp_path):
    file, store = tmp_path / "cluster" / "tuner.csv", tmp_path / "s.db"
    file.parent.mkdir()
    file.write_text(CSV)
    announced = json.loads(zerotune("import", file, "--store", store, "--dry-run", "--json").stdout)
    assert (announced["n_measurements"], announced["recorded"]) == (2, False)
    assert not store.exists()
    recorded = json.loads(zerotune("import", file, "--store", store, "--json").stdout)
    assert recorded == announced | {"recorded": True}
    with Store.open(store, read_only=True) as opened:
        statistics = opened.statistics("cluster")
    assert [(s.is_default, s.median_us) for s in sorted(statistics, key=lambda s: s.median_us)] == [
        (False, 120.5),
        (True, 150.5),
    ]


def test_import_refuses_a_wrong_setting(tmp_path):
    file = tmp_path / "tuner.csv"
    file.write_text(CSV)
    refused(zerotune("import", file, "--setting", "ring/8"), "'8'")
    refused(zerotune("import", file, "--setting", "warp/simple"), "warp")


def test_output_that_cannot_be_written_is_named():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zerotune.tuner.cli", "fabrics"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    refused(done, "/dev/full")
