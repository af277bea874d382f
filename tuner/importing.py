"""`zerotune import`: measurements and traces of other tools into the store."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from agent.nccl.catalog import parse_algorithm, parse_protocol
from store.database import Store
from store.errors import TraceError, UserError
from store.records import Candidate, Collective
from store.trace_format import TRACE_SUFFIX
from tuner.traces import Trace, read_trace
from tuner.traces.files import CHUNK_BYTES
from tuner.traces.formats import by_name
from tuner.traces.records import Block, Summary


def parse_setting(text: str) -> Candidate:
    """A candidate from "ring/ll128" or "ring/ll128/8".

    Raises:
        UserError: it is not of that form or names nothing NCCL has.
    """
    words = text.split("/")
    try:
        algorithm, protocol = parse_algorithm(words[0]), parse_protocol(words[1])
        n_channels = int(words[2]) if len(words) == 3 else 0
        if len(words) > 3:
            raise ValueError
        return Candidate(algorithm, protocol, n_channels)
    except (IndexError, ValueError) as error:
        raise UserError(f"{text!r} is no setting", "write ALGORITHM/PROTOCOL[/CHANNELS], e.g. ring/ll128/8") from error


def import_measurements(
    path: Path,
    store_path: Path,
    *,
    fabric_id: str | None,
    setting: Candidate | None,
    is_default: bool,
    n_nodes: int | None,
    dry_run: bool,
    format_name: str | None = None,
    collective: Collective | None = None,
) -> tuple[Trace, int]:
    """Read `path` and record its measurements; returns the trace with its summary and the rows usable.

    The fabric is named after the folder the file lies in unless `fabric_id` is given, since no format says
    what hardware it was measured on. `format_name` forces a format, `collective` says what was run where the
    files do not. Nothing is written before all files were read without an error. The same files imported in the
    same way are recorded once; an import that was killed goes on where it ended.

    Raises:
        TraceError: the file is of no known format, or broken.
        StoreError: the store cannot be written.
    """
    trace = _opened(path, format_name, collective)
    fabric = fabric_id or path.absolute().parent.name
    how = partial(trace.measurements, setting, is_default=is_default or None, n_nodes=n_nodes)
    n_rows = sum(len(block) for block in how())
    if dry_run or not n_rows:
        return trace, n_rows
    job_id = f"import-{_fingerprint(trace.paths, fabric, setting, is_default, n_nodes, collective)}"
    with Store.open(store_path) as store:
        earlier = next((job for job in store.jobs() if job.job_id == job_id), None)
        if earlier is not None and earlier.ended_at_s is not None:
            trace.summary.note("the same was imported before: nothing was recorded again")
            return trace, 0
        n_kept = 0 if earlier is None else len(store.measurements(fabric, job_id))
        store.record_job(job_id, fabric, {"imported_from": path.name, "format": trace.format_name}, 0)
        n_read = 0
        for block in how():
            store.record_measurements(fabric, job_id, block[max(0, n_kept - n_read) :])
            n_read += len(block)
            store.flush()  # the queue is bounded: a long file must not outrun the writer
        store.update_job(job_id, ended_at_s=time.time())
    return trace, n_rows - n_kept


def _opened(path: Path, format_name: str | None, collective: Collective | None) -> Trace:
    """The trace at `path`. What its name says is ours is ours: if its beginning does not, it is damaged."""
    candidates = [path] if path.is_file() else path.glob(f"*{TRACE_SUFFIX}")
    ours = [file for file in candidates if file.suffix == TRACE_SUFFIX and file.is_file()]
    try:
        trace = read_trace(path, format_name, collective=collective)
    except TraceError:
        if format_name is not None or not ours:
            raise
        return Trace([(file, BY_ITS_NAME) for file in sorted(ours)], collective)
    damaged = sorted(set(ours) - set(trace.paths))
    if not damaged:
        return trace
    known = [(file, by_name(trace.format_name)) for file in trace.paths]
    used = {*trace.paths, *damaged}
    others = [one.name for one in sorted(path.iterdir()) if one.is_file() and one.name[0] != "." and one not in used]
    return Trace([*known, *((file, BY_ITS_NAME) for file in damaged)], collective, others)


def _read_by_its_name(path: Path, summary: Summary) -> Iterator[Block]:
    try:
        yield from OWN.read(path, summary)
    except TraceError as error:
        remedy = "copy it again from where it was written"
        raise TraceError(f"{path.name} is damaged ({error.problem})", remedy) from error


OWN: Final = by_name("zerotune")
BY_ITS_NAME: Final = replace(OWN, read=_read_by_its_name)
DECISIONS: Final = "records of decisions, whose collectives have timed records of their own"


def left_out(trace: Trace) -> dict[str, int]:
    """Reason -> records that are no measurement, most first.

    Our own traces have a record of each decision beside that of the timed collective; only what was decided more
    often than timed can have been missed.
    """
    counts = trace.summary.unusable.copy()
    if trace.format_name == OWN.name:
        n_untimed = counts.pop("no duration", 0)
        n_decisions = min(n_untimed, trace.summary.n_timed)
        counts += Counter({DECISIONS: n_decisions, "no duration": n_untimed - n_decisions})
    return dict(counts.most_common())


def _fingerprint(paths: Sequence[Path], *how: object) -> str:
    """What was imported and how, in 12 characters."""
    digest = hashlib.blake2b(repr(how).encode())
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                digest.update(piece)
    return digest.hexdigest()[:12]


def to_json(trace: Trace, n_rows: int, *, dry_run: bool) -> str:
    """What `render` prints, as one JSON document."""
    summary = trace.summary
    document = {
        "format": trace.format_name,
        "n_files": summary.n_files,
        "n_records": summary.n_records,
        "n_timed": summary.n_timed,
        "n_settings": summary.n_settings,
        "n_measurements": n_rows,
        "recorded": not dry_run,
        "left_out": left_out(trace),
        "notes": summary.notes,
        "facts": summary.facts,
    }
    return json.dumps(document, default=str)


def render(trace: Trace, n_rows: int, console: Console, *, dry_run: bool) -> None:
    """What was found, what could not be used, and why."""
    summary = trace.summary
    console.print(
        f"{trace.title}: {summary.n_records:,} records in {summary.n_files} file(s), {summary.n_timed:,} timed, "
        f"{summary.n_settings:,} say which setting ran"
    )
    console.print(f"{'usable' if dry_run else 'recorded'} as measurements: {n_rows:,}")
    for reason, count in left_out(trace).items():
        # Nothing is missed for want of a decision's record, and half of all would look as if it were.
        console.print(
            f"  beside them: {count:,} {reason}" if reason == DECISIONS else f"  left out: {count:,} ({reason})"
        )
    for note in summary.notes:
        console.print(f"  note: {note}")
