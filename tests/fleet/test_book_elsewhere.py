"""A book for those who do without the daemon: its winners as plans and tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.lib.fleet.fleet_rows import FACTS, measured, signer_of
from zerotune.store.errors import UserError
from zerotune.store.records import Algorithm, Candidate, Protocol
from zerotune.tuner.cli.app import app
from zerotune.tuner.offline.replay.plans import plan_rows

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
from zerotune.tuner.fleet.book import Head, sealed
from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.objects import Fabric, pack
from zerotune.tuner.fleet.storage import Storage

Run = Callable[..., str]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two fabrics; on one of them ring/ll128/8ch wins."""
    folder = tmp_path_factory.mktemp("book")
    for fabric_id, faster in (("wins", 0.1), ("loses", -0.1)):
        for node in range(3):
            block = measured(40, faster=faster, seed=node)
            name, job = f"node{node}", np.zeros(len(block), int)
            packed = pack(name, Fabric(fabric_id, FACTS), ["job"], job, block, 1, signer_of(name))
            Storage(str(folder / "fleet"), writes=True).put(*packed)
    build(str(folder / "fleet"), folder / "fleet.book")
    return folder / "fleet.book"


@pytest.fixture
def run() -> Run:
    def invoke(*words: object) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    return invoke


@pytest.mark.parametrize("to", ["plan", "nvidia-csv", "rccl-csv", "ncclx-csv", "ncclx-json"])
def test_winners_of_a_book_as_tables(book: Path, run: Run, tmp_path: Path, to: str) -> None:
    out = tmp_path / ("t.json" if to in ("plan", "ncclx-json") else "t.csv")
    run("store", "export", out, "--to", to, "--book", book)
    rows = plan_rows(out)
    assert {row.candidate for row in rows} == {Candidate(Algorithm.ring, Protocol.ll128, 8)}
    for n_bytes in (1 << 20, 1 << 24):
        assert any(row.min_bytes <= n_bytes <= row.max_bytes for row in rows)


def test_advice_from_a_book(book: Path, run: Run) -> None:
    """Collectives of 16 ranks that are slower than on a DGX A100 make the advice more modest."""
    words = ["advise", "1B", "--fabric", "dgx_a100", "--nodes", 2, "--json"]
    assumed = json.loads(run(*words))
    told = json.loads(run(*words, "--measured", book, "--fabric-id", "wins"))
    assert told != assumed
    assert "fleet.book" in json.dumps(told)
    assert len(told["assumptions"]) == len(assumed["assumptions"]) - 1
    of_jobs = ["--ran", "stage=3"]
    for more in ([], ["--fabric-id", "none"], ["--fabric-id", "wins", *of_jobs], ["--watch", *of_jobs]):
        with pytest.raises(UserError):
            run(*words, "--measured", book, *more)


def test_advice_from_a_book_of_nothing_or_of_other_gpus_is_refused(run: Run, tmp_path: Path) -> None:
    head = Head("memory://", 0, "a test", 0, 0, 0)
    (tmp_path / "empty.book").write_bytes(sealed([head], None))
    for capability in (80, 90):
        packed = pack("node", Fabric("one", {**FACTS, "compute_capability": capability}), ["job"],
                      np.zeros(80, int), measured(40), 1, None)  # fmt: skip
        Storage(str(tmp_path / f"fleet{capability}"), writes=True).put(*packed)
        build(str(tmp_path / f"fleet{capability}"), tmp_path / f"{capability}.book")
    words = ["advise", "1B", "--fabric", "dgx_a100", "--nodes", 2, "--json", "--measured"]
    assert json.loads(run(*words, tmp_path / "80.book"))["measured"]
    for name in ("empty.book", "90.book"):
        with pytest.raises(UserError):
            run(*words, tmp_path / name)


@pytest.mark.parametrize(
    "words", [["--fabric-id", "loses"], ["--job", "job"], ["--to", "measurements"], ["--book-key", "none"]]
)
def test_options_that_a_book_lacks_are_refused(book: Path, run: Run, tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(UserError):
        run("store", "export", tmp_path / "t", "--book", book, *words)
