"""How long `zerotune book build` takes, and how much memory: a book of as many rows as a fleet measures in weeks.

Objects of 200,000 rows are made in a folder first, as daemons write them, by hundreds of nodes of four fabrics; one
node in ten lies. Measured of the command itself, as a process of its own:

* build_s, book_rows_per_s, build_cpu_s: the first build, of all but the last object, and what processors worked on it.
* book_peak_mib: the most memory that it held.
* next_build_s: a second build, in which the last object is new.
* winners_right_share: winners of the book that are the truth's, and of the truth's that are in the book, the lesser.
* liars_set_aside_share: of those that lie, or were taken for liars.

Run: python -m benchmarks book_build [--quick] [--json] [--rows N] [--memory-mb N] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.lib.argument_types import positive
from benchmarks.lib.fleet.fleet_objects import ROWS_PER_OBJECT, is_liar, object_of, winners
from benchmarks.lib.reporting import Result, report, say
from zerotune.tuner.fleet.book import Book
from zerotune.tuner.fleet.reading import read_book
from zerotune.tuner.fleet.storage import Storage

N_ROWS, N_ROWS_QUICK = 10_000_000, 4_800_000
BOOK: Final = "fleet.book"


class Built(NamedTuple):
    """What one build took."""

    wall_s: float
    cpu_s: float
    """Of all its threads."""
    peak_mib: float


def make(folder: Path, n_rows: int, at: int) -> None:
    """Write one object; where it is there already it stays.

    Args:
        folder: of the benchmark.
        n_rows: of all objects together.
        at: its number.
    """
    n_here = min(ROWS_PER_OBJECT, n_rows - at * ROWS_PER_OBJECT)
    Storage(str(folder / "fleet"), writes=True).put(*object_of(at, n_here))


def make_all(folder: Path, n_rows: int, n_objects: int) -> None:
    """Write objects, with all processors.

    Args:
        folder: of the benchmark.
        n_rows: of all objects together, those that are not written here, too.
        n_objects: the first so many are written.
    """
    pool = ProcessPoolExecutor(os.cpu_count())
    try:
        made = [pool.submit(make, folder, n_rows, at) for at in range(n_objects)]
        for at, one in enumerate(made, start=1):
            one.result()
            if at % max(1, n_objects // 20) == 0:
                say(f"{at:,} of {n_objects:,} objects are made")
    finally:
        pool.shutdown(cancel_futures=True)


def build(folder: Path, memory_mb: int) -> Built:
    """Run the command, and look at what it took."""
    command = [sys.executable, "-m", "zerotune.tuner.cli", "book", "build", str(folder / "fleet")]
    begun_s = time.monotonic()
    command += ["--out", str(folder / BOOK), "--memory-mb", str(memory_mb), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"book build ended with exit code {process.returncode}")
    return Built(time.monotonic() - begun_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def rightness(book: Book, n_objects: int) -> tuple[float, float]:
    """Shares of winners that are right, and of liars that were set aside."""
    truth = winners()
    found = {
        (one.fabric_id, one.collective, one.phase, one.bytes_range[0], str(one.candidate)) for one in book.winners()
    }
    liars = {f"node{at}" for at in range(n_objects) if is_liar(at)}
    named = {one.name for one in book.contributors if one.is_set_aside}
    right = len(truth & found) / max(len(truth), len(found))
    return right, len(liars & named) / max(len(liars | named), 1)


def measure(folder: Path, n_rows: int, memory_mb: int) -> list[Result]:
    """All figures of a book.

    Args:
        folder: for objects and book.
        n_rows: that it is made of.
        memory_mb: that DuckDB may take.

    Returns:
        What was measured.
    """
    n_objects = -(-n_rows // ROWS_PER_OBJECT)
    make_all(folder, n_rows, n_objects - 1)
    first = build(folder, memory_mb)
    make(folder, n_rows, n_objects - 1)
    second = build(folder, memory_mb)
    book = read_book(str(folder / BOOK))
    n_first = (n_objects - 1) * ROWS_PER_OBJECT
    right, set_aside = rightness(book, n_objects)
    at_most_s = max(30.0, 300.0 * n_rows / 1e8)
    return [
        Result("book_rows", book.head.n_rows, "rows", f"{n_rows}"),
        Result("build_s", first.wall_s, "s", f"<= {at_most_s:g}"),
        Result("book_rows_per_s", n_first / first.wall_s, "rows/s"),
        Result("build_cpu_s", first.cpu_s, "s"),
        Result("book_peak_mib", max(first.peak_mib, second.peak_mib), "MiB", "<= 8192"),
        Result("next_build_s", second.wall_s, "s"),
        Result("winners_right_share", right, "", "1"),
        Result("liars_set_aside_share", set_aside, "", "1"),
    ]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{N_ROWS_QUICK:,} rows; ends within 60 s")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    parser.add_argument("--rows", type=positive, help=f"how many (default: {N_ROWS:,})")
    parser.add_argument("--memory-mb", type=positive, default=4096, help="that DuckDB may take (default: 4096)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make objects and book there, and leave them")
    arguments = parser.parse_args()
    n_rows = arguments.rows or (N_ROWS_QUICK if arguments.quick else N_ROWS)
    if n_rows <= ROWS_PER_OBJECT:
        parser.error(f"--rows {n_rows}: at least {ROWS_PER_OBJECT + 1:,} are two objects")
    with tempfile.TemporaryDirectory() as name:
        results = measure(arguments.keep or Path(name), n_rows, arguments.memory_mb)
    report("book_build", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
