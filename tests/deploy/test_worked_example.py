"""The commands of docs/operate/worked-example.md, from an empty Slurm cluster to the report, in a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, free_ports, missing_program, slurm_cluster

from zerotune.store.sqlite.database import Store

pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
from zerotune.tuner.fleet.reading import read_book
from zerotune.tuner.fleet.signing import Verifier

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operate" / "worked-example.md").read_text()

pytestmark = [
    pytest.mark.slow,  # a minute: CI runs it by itself, after the suite
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0, reason="starts Slurm's daemons as root"),
    pytest.mark.skipif(
        missing_program() is not None, reason=f"no {missing_program()}: apt-get install slurmctld slurmd munge"
    ),
]


def blocks(language: str) -> str:
    return "".join(re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="zt-") as folder:
        with slurm_cluster(Path(folder), more=blocks("conf"), apart=True) as made:
            made.environment |= {
                "PATH": f"{Path(sys.executable).parent}:{made.environment['PATH']}",
                "OMP_NUM_THREADS": "1",
                "RENDEZVOUS": f"127.0.0.1:{free_ports(1)[0]}",  # the script's own port may be another's on this machine
            }
            yield made
        assert made.left_on_nodes() == []


def test_the_other_node_starts_with_what_the_first_learned(cluster: SlurmCluster) -> None:
    here = cluster.folder / "checkout"
    here.mkdir()
    for name in ("agent", "deploy", "zero_runtime"):
        (here / name).symlink_to(ROOT / name)
    commands = ["bash", "-euxo", "pipefail", "-c", blocks("sh")]
    done = subprocess.run(
        cluster.on_node("login", commands), cwd=here, env=cluster.environment, timeout=570, check=False
    )
    assert done.returncode == 0
    shared = cluster.folder / "mnt" / "shared"
    book = read_book(str(shared / "fleet.book"), Verifier.of(str(shared / "book.key.pub")))
    assert (book.head.n_jobs, book.skipped) == (1, ())
    assert [one.name for one in book.contributors] == ["n1"]
    winners = {one.key: one.candidate for one in book.winners()}
    assert winners
    with Store.open(cluster.state_of("n1") / "zerotune" / "0" / "store.db", read_only=True) as store:
        assert book.head.n_rows == store.count_measurements(), "what the service held when it ended is there, too"
    with Store.open(cluster.state_of("n2") / "zerotune" / "0" / "store.db", read_only=True) as store:
        (job,) = store.jobs()
        assert job.name == "second"
        decisions = [one for one in store.decisions(job.job_id) if not one.is_of_job]
    first = min(one.epoch for one in decisions)
    plan = {one.key: one.candidate for one in decisions if one.epoch == first}
    assert plan.items() <= winners.items(), "the first plan is the book's, and nothing else"
    tried = {one.key: one.candidate for one in sorted(decisions, key=lambda one: -one.epoch) if one.kind == "explore"}
    assert sum(tried.get(key) == winner for key, winner in winners.items()) > len(winners) / 2
    assert job.job_id in (here / "report.html").read_text()
    ends_at_s = time.monotonic() + 60
    while cluster.left_on_nodes() and time.monotonic() < ends_at_s:
        time.sleep(0.2)  # the last epilog runs
