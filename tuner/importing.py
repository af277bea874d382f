"""`zerotune import`: measurements and traces of other tools into the store."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray
from rich.console import Console

from agent.nccl.catalog import parse_algorithm, parse_protocol
from store.database import Store
from store.errors import TraceError, UserError
from store.records import Candidate, Collective
from store.trace_format import TRACE_SUFFIX
from tuner.traces import Trace, read_trace
from tuner.traces.formats import by_name
from tuner.traces.measuring import NODES_UNKNOWN, RANKS_UNKNOWN, Portion, Said
from tuner.traces.records import Block, Summary


def parse_setting(text: str) -> Candidate:
    """A candidate from "ring/ll128", "ring/ll128/8" or, as settings are printed, "ring/ll128/8ch".

    Raises:
        UserError: it is not of that form or names nothing NCCL has.
    """
    words = text.split("/")
    try:
        algorithm, protocol = parse_algorithm(words[0]), parse_protocol(words[1])
        n_channels = int(words[2].removesuffix("ch")) if len(words) == 3 else 0
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
    """Read `path` and record its measurements; returns the trace with its summary and the rows recorded or usable.

    What the file tells (fabric, job, nodes, what ran and who chose it) goes before what is said here. Without
    either, the fabric is named after the folder that is imported, or that the file lies in. `format_name` forces a
    format, `collective` says what was run where the files do not. Nothing is written before all files were read
    without an error. Nothing is recorded twice, and an import that was killed goes on where it ended.

    Raises:
        UserError: the file holds nothing to use, or what was said cannot be.
        TraceError: the file is of no known format, or broken.
        StoreError: the store cannot be written.
    """
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
    trace = _opened(path, format_name, collective)
    said = Said(setting, is_default, n_nodes)
    found: Counter[Owner] = Counter()
    portions: dict[Owner, Portion] = {}
    untold_job, digest = "", hashlib.blake2b()

    def owned() -> Iterator[tuple[Owner, Portion]]:
        for portion in trace.portions(said):
            fabric = portion.fabric_id or fabric_id or folder_name(path)
            yield (portion.job_id or untold_job, fabric), portion

    for owner, portion in owned():
        found[owner] += len(portion.rows)
        portions.setdefault(owner, replace(portion, rows=portion.rows[:0]))
        if portion.job_id is None:
            digest.update(portion.rows.tobytes())
    n_rows = found.total()
    _refuse_nothing(path, trace, n_rows, dry_run=dry_run)
    if fabric_id is not None and any(one.fabric_id not in (None, fabric_id) for one in portions.values()):
        trace.summary.note("the file tells the fabric: --fabric-id was not used for it")
    trace.summary.fabrics = list(dict.fromkeys(fabric for _, fabric in found))
    trace.summary.is_named_after_folder = fabric_id is None and any(not one.fabric_id for one in portions.values())
    if dry_run:
        return trace, n_rows
    first_look = trace.summary  # a second one begins with the second reading
    if untold := sorted(fabric for job_id, fabric in found if not job_id):
        untold_job = _name_of(digest, untold)
    with Store.open(store_path) as store:
        if fabric_id is None and list(found) == [("", folder_name(path))]:
            earlier = _earlier_fabric(store, digest)
            if earlier not in (None, folder_name(path)):
                trace.summary.fabrics, trace.summary.is_named_after_folder = [earlier], False
                trace.summary.note(f"imported before as fabric {earlier}: --fabric-id records it as another one, too")
                return trace, 0
        kept = _kept(store, untold_job, found, owned)
        described, known_ranks = store.fabrics(), {job.job_id: job.n_ranks for job in store.jobs()}
        origin: dict[str, str | int | float | bool] = {"imported_from": path.name, "format": trace.format_name}
        for (told_job, fabric), portion in portions.items():
            job_id = told_job or untold_job
            if kept[job_id, fabric] < found[told_job, fabric]:
                description = {} if described.get(fabric) else dict(portion.fabric) or origin
                store.record_job(job_id, fabric, description, portion.n_ranks or known_ranks.get(job_id, 0))
        n_recorded = 0
        for (job_id, fabric), portion in owned():
            n_known = min(kept[job_id, fabric], len(portion.rows))
            kept[job_id, fabric] -= n_known
            store.record_measurements(fabric, job_id, portion.rows[n_known:])
            store.flush()  # the queue is bounded: a long file must not outrun the writer
            n_recorded += len(portion.rows) - n_known
        for job_id in {job_id or untold_job for job_id, _ in found}:
            store.update_job(job_id, ended_at_s=time.time())
    trace.summary.notes[:] = list(dict.fromkeys([*first_look.notes, *trace.summary.notes]))
    trace.summary.fabrics, trace.summary.is_named_after_folder = first_look.fabrics, first_look.is_named_after_folder
    if not n_recorded:
        trace.summary.note("the same was imported before: nothing was recorded again")
    return trace, n_recorded


def folder_name(path: Path) -> str:
    """The name of the folder that is imported, or that the file lies in."""
    whole = Path(os.path.abspath(path))
    return (whole if path.is_dir() else whole.parent).name or "root"


Owner = tuple[str, str]
"""Job and fabric."""


def _name_of(rows: hashlib.blake2b, fabrics: list[str]) -> str:
    """The job of rows that name none: the same rows are the same import, whatever was said that they tell already."""
    whole = rows.copy()
    whole.update(repr(fabrics).encode())
    return f"import-{whole.hexdigest()[:12]}"


def _earlier_fabric(store: Store, rows: hashlib.blake2b) -> str | None:
    """The fabric as which these very rows were imported: the folder may have been called otherwise then."""
    ended = (job for job in store.jobs() if job.ended_at_s is not None)
    return next((job.fabric_id for job in ended if job.job_id == _name_of(rows, [job.fabric_id])), None)


def _kept(
    store: Store, untold_job: str, found: Counter[Owner], owned: Callable[[], Iterator[tuple[Owner, Portion]]]
) -> Counter[Owner]:
    """How many of its rows, from the first on, the store has of each owner.

    Raises:
        UserError: the store has other rows under one of the jobs, so that these would be a second set.
    """
    if any(job.job_id == untold_job and job.ended_at_s is not None for job in store.jobs()):
        return Counter({(untold_job, fabric): n_rows for (_, fabric), n_rows in found.items()})
    stored: dict[Owner, NDArray[Any]] = {}
    for job_id, fabric in found:
        rows = store.measurements(fabric, job_id or untold_job)
        if len(rows):
            stored[job_id or untold_job, fabric] = rows
    seen: Counter[Owner] = Counter()
    for owner, portion in owned() if stored else ():
        known = stored.get(owner, portion.rows[:0])[seen[owner] :][: len(portion.rows)]
        seen[owner] += len(portion.rows)
        if known.tobytes() != portion.rows[: len(known)].tobytes():
            job_id, fabric = owner
            raise UserError(
                f"{store.path} has job {job_id} on {fabric} already, recorded otherwise: it would be counted twice",
                "name another store with --store",
            )
    return Counter({owner: len(rows) for owner, rows in stored.items()})


def _refuse_nothing(path: Path, trace: Trace, n_rows: int, *, dry_run: bool) -> None:
    """Nothing to use is no success; a dry run is content with records, of which it says why they cannot be used."""
    summary = trace.summary
    if n_rows or (dry_run and summary.n_records):
        return
    reasons = "; ".join(f"{reason} ({count:,})" for reason, count in list(left_out(trace).items())[:3])
    what = (
        f"none of its {summary.n_records:,} records is a measurement"
        if summary.n_records
        else f"it has no {trace.record} to use"
    )
    remedy = "docs/traces.md says what each format must hold"
    for reason, remedy_for in _REMEDIES.items():
        if any(reason in one for one in summary.unusable):
            remedy = remedy_for
    raise UserError(f"{path} was read as {trace.title}: {what}{f': {reasons}' if reasons else ''}", remedy)


_REMEDIES: Final = {
    "does not say which collective": "say with --collective what was run",
    "no duration": "a table needs a column of times, `latency_us` in NVIDIA's tuner CSV (docs/traces.md)",
    NODES_UNKNOWN: "say with --n-nodes on how many nodes it ran",
    RANKS_UNKNOWN: "only the file can say that: a table needs a column `ranks` (docs/traces.md)",
    "nobody says which setting ran": "say with --default or --setting what ran",
}


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


def to_json(trace: Trace, n_rows: int, *, dry_run: bool) -> str:
    """What `render` prints, as one JSON document."""
    summary = trace.summary
    document = {
        "format": trace.format_name,
        "n_files": summary.n_files,
        "n_records": summary.n_records,
        "n_timed": summary.n_timed,
        "n_settings": summary.n_settings,
        "n_joined": summary.n_joined,
        "n_measurements": n_rows,
        "recorded": not dry_run,
        "fabrics": summary.fabrics,
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
    if summary.n_joined:
        console.print(f"joined over ranks: {summary.n_joined:,} timed records")
    where = f" on fabric {', '.join(summary.fabrics)}" if summary.fabrics else ""
    if summary.is_named_after_folder:
        where += ", named after the folder (--fabric-id says another name)"
    console.print(f"{'usable' if dry_run else 'recorded'} as measurements: {n_rows:,}{where}")
    for reason, count in left_out(trace).items():
        # Nothing is missed for want of a decision's record, and half of all would look as if it were.
        console.print(
            f"  beside them: {count:,} {reason}" if reason == DECISIONS else f"  left out: {count:,} ({reason})"
        )
    for note in summary.notes:
        console.print(f"  note: {note}")
