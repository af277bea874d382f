"""`zerotune store import`: measurements and traces of other tools into the store."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ....agent.nccl.catalog import parse_algorithm, parse_protocol
from ....store.errors import TraceAccessError, TraceError, UserError
from ....store.records import Candidate, Collective, CommunicatorClass
from ....store.sqlite.database import Store
from ....store.sqlite.rows.measurements import candidate_of
from ....store.sqlite.rows.runnable import runnable_cells
from ....store.trace_format import TRACE_SUFFIX
from ...traces import Trace, read_trace
from ...traces.formats import by_name
from ...traces.measuring import UserFacts
from ...traces.records import Block, Summary
from .messages import OWN_FORMAT, REMEDIES, left_out
from .reading import Owner, Reading


def parse_setting(text: str) -> Candidate:
    """The setting named by "ring/ll128", "ring/ll128/8" or, as settings are printed, "ring/ll128/8ch".

    The protocol may be left out, or be "any", if NCCL chose it: "tree", "tree/8ch". It is filled in if NCCL has only
    one for the algorithm. Any other text raises UserError.
    """
    name, *words = text.split("/")
    algorithm = parse_algorithm(name)
    if not words or _CHANNELS.fullmatch(words[0].lower()):
        words.insert(0, "any")
    protocol = None if words[0].lower() == "any" else parse_protocol(words[0])
    try:
        n_channels = int(words[1].lower().removesuffix("ch")) if len(words) > 1 else 0
        if len(words) > 2:
            raise ValueError
        possible = {cell[1] for one in Collective for cell in runnable_cells(one, 0) if cell[0] is algorithm}
        if protocol is None and len(possible) == 1:
            (protocol,) = possible
        return Candidate(algorithm, protocol, n_channels)
    except ValueError as error:
        raise UserError(
            f"{text!r} is no setting", "write ALGORITHM[/PROTOCOL][/CHANNELS], e.g. ring/ll128/8ch"
        ) from error


_CHANNELS: Final = re.compile(r"[0-9]+ch")
"""Channels in the protocol's place; a number without "ch" there is NCCL's number of a protocol."""


def import_measurements(
    path: Path,
    store_path: Path,
    *,
    fabric_id: str | None,
    setting: Candidate | None,
    is_default: bool,
    n_nodes: int | None,
    dry_run: bool,
    n_ranks: int | None = None,
    format_name: str | None = None,
    collective: Collective | None = None,
) -> tuple[Trace, int]:
    """Read measurements and record those that the store does not have; returns also the number of rows recorded.

    Fields of the file (fabric, job, nodes, setting and who chose it) take precedence over the arguments, but `n_nodes`
    also corrects a wrong count. Nothing is written before all files were read without an error; an import that was
    killed continues where it ended.

    Without `fabric_id`, the fabric has the folder's name. With `dry_run`, the number is that of usable rows.

    Raises:
        UserError: the file has nothing to use, or an argument contradicts it.
        TraceError: the file is of no known format, or damaged.
    """
    _check_options(setting, is_default, fabric_id)
    trace = _opened(path, format_name, collective)
    reading = Reading(trace, UserFacts(setting, is_default, n_nodes, n_ranks), path, fabric_id)
    n_rows = reading.n_rows.total()
    _refuse_nothing(path, trace, n_rows, dry_run=dry_run)
    summary = trace.summary  # each further reading begins a new summary
    if dry_run:
        return trace, n_rows
    with Store.open(store_path) as store:
        origin: dict[str, str | int | float | bool] = {"imported_from": path.name, "format": trace.format_name}
        n_recorded = _record(store, reading, origin)
    trace.summary = summary
    if not n_recorded:
        summary.note("the same was imported before: nothing was recorded again")
    elif n_recorded < n_rows:
        summary.note(f"{n_rows - n_recorded:,} of its measurements were recorded before, and not again")
    return trace, n_recorded


def _check_options(setting: Candidate | None, is_default: bool, fabric_id: str | None) -> None:
    """Raise UserError for options that contradict each other, whatever the file has."""
    if setting is not None and is_default:
        raise UserError("--setting and --default contradict each other", "say what was forced, or that nothing was")
    if fabric_id is not None and not fabric_id.strip():
        raise UserError(
            f"--fabric-id {fabric_id!r} names nothing", "name the hardware, or leave it out for the folder's name"
        )
    if fabric_id is not None and not fabric_id.isprintable():
        raise UserError(
            f"--fabric-id {fabric_id!r} has a line break or another character that cannot be printed",
            "name the fabric in one line of text",
        )


def _record(store: Store, reading: Reading, origin: Mapping[str, str | int | float | bool]) -> int:
    """Record rows that the store does not have; returns their number. `origin` describes fabrics new to the store."""
    reading.name_as_before(store)
    n_rows, kept = reading.n_rows, _kept(store, reading)
    described, known_ranks = store.fabrics(), {job.job_id: job.n_ranks for job in store.jobs()}
    for (job_id, fabric), portion in reading.first().items():
        if kept[job_id, fabric] < n_rows[job_id, fabric]:
            description = {} if described.get(fabric) else dict(portion.fabric or origin)
            store.record_job(job_id, fabric, description, portion.n_ranks or known_ranks.get(job_id, 0))
    n_recorded = 0
    for (job_id, fabric), portion in reading.owned():
        n_known = min(kept[job_id, fabric], len(portion.rows))
        kept[job_id, fabric] -= n_known
        store.record_measurements(fabric, job_id, portion.rows[n_known:])
        store.commit()  # the queue is bounded: a long file must not outrun the writer
        n_recorded += len(portion.rows) - n_known
    for job_id in {job_id for job_id, _ in n_rows}:
        store.update_job(job_id, ended_at_s=time.time())
    store.commit()
    return n_recorded


def _kept(store: Store, reading: Reading) -> Counter[Owner]:
    """How many of each owner's first rows the store has or once had.

    Raises UserError if the store has other rows under one of the jobs.
    """
    n_rows = reading.n_rows
    whole = {job.job_id for job in store.jobs() if job.ended_at_s is not None} & reading.unnamed_jobs
    stored = {}
    for job_id, fabric in n_rows:
        limit = _COMPARED_ROWS if job_id in whole else None
        rows = store.measurements(fabric, job_id, limit=limit, chunk_bytes=None)
        if len(rows):
            stored[job_id, fabric] = rows
    seen: Counter[Owner] = Counter()
    for owner, portion in reading.owned() if stored else ():
        if owner not in stored:
            continue
        # A complete import's oldest rows may have been deleted; its newest rows are enough.
        first = n_rows[owner] - len(stored[owner]) if owner[0] in whole else 0
        begin, end = (seen[owner] + at - first for at in (0, len(portion.rows)))
        seen[owner] += len(portion.rows)
        known = stored[owner][max(begin, 0) : max(end, 0)]
        here = portion.rows[max(-begin, 0) :][: len(known)]
        if first < 0 or known.tobytes() != here.tobytes():
            raise _recorded_otherwise(store, owner, known, here, is_import=owner[0] in whole)
    return Counter({owner: n_rows[owner] if owner[0] in whole else len(stored.get(owner, ())) for owner in n_rows})


_COMPARED_ROWS: Final = 10_000


def _recorded_otherwise(store: Store, owner: Owner, known: Block, here: Block, *, is_import: bool) -> UserError:
    job_id, fabric = owner
    words = f"{store.path} has job {job_id} on {fabric} already, with other measurements: both would be counted"
    if is_import:
        pairs = ((_setting_and_place(then), _setting_and_place(now)) for then, now in zip(known, here, strict=False))
        differs = next((f"as {then}, now as {now}" for then, now in pairs if then != now), "")
        how = differs or "when another part of them could be used"
        words = f"{store.path} has the same measurements, imported before {how}: they would be counted twice"
    return UserError(words, "name another store with --store")


def _setting_and_place(row: Any) -> str:
    """Setting and place in words: the fields that the user's options may have filled in."""
    setting = candidate_of(row["algorithm"], row["protocol"], int(row["n_channels"]))
    own = "NCCL's own choice" if row["is_default"] else str(setting)
    place = CommunicatorClass(int(row["n_ranks"]), int(row["n_nodes"]))
    return f"{own} for {Collective(row['collective']).name} of {place}"


def _refuse_nothing(path: Path, trace: Trace, n_rows: int, *, dry_run: bool) -> None:
    """Raise UserError if nothing can be used; a dry run only needs records, and prints why they cannot be used."""
    summary = trace.summary
    if n_rows or (dry_run and summary.n_records):
        return
    reasons = "; ".join(
        f"{summary.with_examples(reason)} ({count:,})" for reason, count in list(left_out(trace).items())[:3]
    )
    what = (
        f"none of its {summary.n_records:,} records is a measurement"
        if summary.n_records
        else f"it has no {trace.record} to use"
    )
    if summary.columns_found and not summary.n_records:
        what += f" (its columns: {summary.columns_found[:200]})"
    remedy = "docs/reference/formats.md says what each format must hold"
    for reason, remedy_for in REMEDIES.items():
        if reason in summary.unusable:
            remedy = remedy_for
    faults = "".join(f"; {fault}" for fault in summary.faults[:3])
    raise UserError(f"{path} was read as {trace.title}: {what}{f': {reasons}' if reasons else ''}{faults}", remedy)


def _opened(path: Path, format_name: str | None, collective: Collective | None) -> Trace:
    """The trace at `path`. A file with our suffix is taken as ours: if its beginning is not, it is damaged."""
    candidates = [path] if path.is_file() else path.glob(f"*{TRACE_SUFFIX}")
    own = [file for file in candidates if file.suffix == TRACE_SUFFIX and file.is_file()]
    try:
        trace = read_trace(path, format_name, collective=collective)
    except TraceError:
        if format_name is not None or not own:
            raise
        return Trace([(file, BY_ITS_NAME) for file in sorted(own)], collective)
    damaged = sorted(set(own) - set(trace.paths))
    if not damaged:
        return trace
    known = [(file, by_name(trace.format_name)) for file in trace.paths]
    used = {*trace.paths, *damaged}
    others = [one.name for one in sorted(path.iterdir()) if one.is_file() and one.name[0] != "." and one not in used]
    return Trace([*known, *((file, BY_ITS_NAME) for file in damaged)], collective, others)


def _read_by_its_name(path: Path, summary: Summary) -> Iterator[Block]:
    try:
        yield from OWN.read(path, summary)
    except TraceAccessError:
        raise
    except TraceError as error:
        remedy = "copy it again from where it was written"
        raise TraceError(f"{path.name} is damaged ({error.problem})", remedy) from error


OWN: Final = by_name(OWN_FORMAT)
BY_ITS_NAME: Final = replace(OWN, read=_read_by_its_name)
