"""`zerotune store book build`: merges new objects below a URL, and writes the book of all merged ones."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import duckdb

from ...store.atomic_file import users_file
from ...store.errors import UserError
from . import job_lines
from .book import MAX_BYTES, MAX_FABRICS, MAX_LINES, Book, FabricLine, Head, Line, Skipped, sealed
from .consensus import agree
from .merging import MEMORY_MB, Merged, Merging, Progress
from .signing import Signer
from .storage import Storage, shown

STATE_SUFFIX: Final = ".merged"
"""Suffix of the merged state beside the book, so that the next build reads only new objects."""
MAX_SKIPPED: Final = 1000
"""Most refused objects that a book names."""


class Built(NamedTuple):
    """Result of a build."""

    merged: Merged
    book: Book
    n_jobs_new: int


def build(
    url: str,
    out: Path,
    *,
    listed: Mapping[str, str] | None = None,
    signer: Signer | None = None,
    memory_mb: int = MEMORY_MB,
    made_by: str = "",
    progress: Progress = lambda looked_at, there_are, n_rows: None,
) -> Built:
    """Write a book to `out`, and keep the merged state beside it.

    `listed` has the names, by key, of the contributors that are used; None: all are. Without a signer, the book is
    unsigned. DuckDB may take `memory_mb`. The head names `made_by` as the version of zerotune.

    Raises:
        UserError: the URL cannot be listed, it has none of our objects, or a file cannot be written.
    """
    storage, state = Storage(url), out.with_name(out.name + STATE_SUFFIX)
    with Merging(state, memory_mb) as merging:
        connection = merging.connection
        _check_url(connection, shown(url), state)
        try:
            merged = merging.merge(storage, progress)
            n_jobs_new = job_lines.refresh(connection)
            (n_objects, n_rows) = connection.execute(
                "SELECT count(*), coalesce(sum(n_rows), 0)::BIGINT FROM objects"
            ).fetchall()[0]
            if not n_objects:
                n_skipped = len(merged.skipped)
                raise UserError(f"nothing below {shown(url)} is ours, {n_skipped} objects were skipped", "is it right?")
            contributors, cells = agree(connection, listed)
            (n_jobs,) = connection.execute(f"SELECT count(*) FROM (SELECT DISTINCT {_JOB} FROM lines)").fetchall()[0]
            (made_before_s,) = connection.execute("SELECT made_at_s FROM meta").fetchall()[0]
            made_at_s = max(int(time.time()), made_before_s + 1)  # daemons refuse older books
            connection.execute("UPDATE meta SET made_at_s = ?", [made_at_s])
            head = Head(shown(url)[-512:], made_at_s, made_by, n_objects, n_rows, n_jobs)
            book = Book(
                head, tuple(_fabrics(connection)), tuple(contributors), tuple(_skipped(connection)), tuple(cells),
                signed_by="" if signer is None else signer.public_hex,
            )  # fmt: skip
        except duckdb.Error as error:
            words = " ".join(str(error).split())[:200]
            raise UserError(f"{state} failed: {words}", "give it more --memory-mb or disk, or remove it") from error
    data = sealed(_lines(book), signer)
    if len(data) > MAX_BYTES or data.count(b"\n") > MAX_LINES or len(book.fabrics) > MAX_FABRICS:
        where = f"move fabrics that are gone from below {shown(url)}"
        problem = f"{out} would have {len(data) >> 20} MiB and {len(book.fabrics):,} fabrics"
        raise UserError(f"{problem}, daemons read {MAX_BYTES >> 20} and {MAX_FABRICS:,}", where)
    with users_file(out) as partial:
        partial.write_bytes(data)
    return Built(merged, book, n_jobs_new)


_JOB: Final = "fabric_id, contributor, job_id"


def _lines(book: Book) -> Iterator[Line]:
    yield book.head
    yield from book.fabrics
    yield from book.contributors
    yield from book.skipped
    yield from book.cells


def _check_url(connection: duckdb.DuckDBPyConnection, url: str, state: Path) -> None:
    """Refuses a merged state of another URL."""
    n_objects = "(SELECT count(*) FROM objects)"
    known, n_merged = connection.execute(f"SELECT url, {n_objects} FROM meta").fetchall()[0]
    if known and known != url:
        if n_merged:
            raise UserError(
                f"{state} holds what was merged of {known}", "write the book of another URL to another --out"
            )
        connection.execute("DELETE FROM not_believed")  # a mistyped URL without our objects
    connection.execute("UPDATE meta SET url = ?", [url])


def _fabrics(connection: duckdb.DuckDBPyConnection) -> Iterator[FabricLine]:
    """Fabrics' facts by the majority of contributors that were used there, as anybody may invent fabrics."""
    found = connection.execute(
        "SELECT fabric_id, facts FROM fabrics"
        " SEMI JOIN (FROM judged_contributors WHERE NOT is_set_aside) USING (fabric_id, contributor)"
        " GROUP BY fabric_id, facts"
        " QUALIFY row_number() OVER (PARTITION BY fabric_id ORDER BY count(*) DESC, facts) = 1 ORDER BY ALL"
    )
    for fabric_id, facts in found.fetchall():
        yield FabricLine(fabric_id, json.loads(facts))


def _skipped(connection: duckdb.DuckDBPyConnection) -> Iterator[Skipped]:
    found = connection.execute(f"SELECT path, reason FROM not_believed ORDER BY ALL LIMIT {MAX_SKIPPED}")
    for path, reason in found.fetchall():
        yield Skipped(path[-512:], reason[:512])
