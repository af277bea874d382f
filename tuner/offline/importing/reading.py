"""Reads files for `zerotune store import`: finds the job of each row, and duplicate files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ....store.sqlite.database import Store
from ...traces import Trace
from ...traces.extents import Extent, extents, together
from ...traces.measuring import Portion, UserFacts

Owner = tuple[str, str]
"""Job and fabric."""
_Place = tuple[Path | None, str | None, str | None]
"""A file, and the job and fabric that it names."""


def folder_name(path: Path) -> str:
    """The name of the imported folder, or of the folder with the file."""
    whole = Path(os.path.abspath(path))
    return (whole if path.is_dir() else whole.parent).name or "root"


class Reading:
    """A trace that is read once before anything is recorded; `owned` reads it again.

    The rows of a file that names no job become a job named by a hash of the file's contents. So equal contents are one
    import, alone or beside other files, whatever the folder's name and the user's options are.
    """

    def __init__(self, trace: Trace, user_facts: UserFacts, path: Path, fabric_id: str | None) -> None:
        self._trace, self._user_facts = trace, user_facts
        self._default_fabric, self._is_named_after_folder = fabric_id or folder_name(path), fabric_id is None
        self._n_rows: Counter[_Place] = Counter()
        self._first: dict[_Place, Portion] = {}
        of_files: dict[Path | None, list[Extent]] = {}
        for portion in trace.portions(user_facts):
            place = portion.path, portion.job_id, portion.fabric_id
            self._n_rows[place] += len(portion.rows)
            self._first.setdefault(place, replace(portion, rows=portion.rows[:0]))
            of_files[portion.path] = together([*of_files.get(portion.path, ()), *extents(portion.rows)])
        self._contents = trace.contents
        self._copies = self._find_copies()
        for place in [one for one in self._n_rows if one[0] in self._copies]:
            del self._n_rows[place]
        used = (parts for file, parts in of_files.items() if file not in self._copies)
        trace.summary.extents = together(one for parts in used for one in parts)
        self._fabrics: dict[Path | None, str] = {}
        """Fabric of files that name none, and whose folder had another name when they were imported earlier."""
        self._find_owners()
        if fabric_id is not None and any(fabric not in (None, fabric_id) for _, _, fabric in self._n_rows):
            trace.summary.note("the file tells the fabric: --fabric-id was not used for it")

    def _find_copies(self) -> set[Path]:
        """Files with the contents of an earlier one."""
        first: dict[bytes, Path] = {}
        copies = set()
        for path, content in self._contents.items():
            if path is not None and (same := first.setdefault(content.digest(), path)) != path:
                copies.add(path)
                self._trace.summary.note(f"{path.name} holds the same as {same.name}: it was used once")
        return copies

    @property
    def n_rows(self) -> Counter[Owner]:
        """Rows of each job on each fabric."""
        found: Counter[Owner] = Counter()
        for place, n_rows in self._n_rows.items():
            found[self._owners[place]] += n_rows
        return found

    @property
    def unnamed_jobs(self) -> set[str]:
        """Jobs that no file names."""
        return {job_id for (_, stated, _), (job_id, _) in self._owners.items() if stated is None}

    def first(self) -> dict[Owner, Portion]:
        """The first portion of each file, without its rows."""
        found: dict[Owner, Portion] = {}
        for place in self._n_rows:
            found.setdefault(self._owners[place], self._first[place])
        return found

    def owned(self) -> Iterator[tuple[Owner, Portion]]:
        """All portions, read again."""
        for portion in self._trace.portions(self._user_facts):
            if portion.path not in self._copies:
                yield self._owners[portion.path, portion.job_id, portion.fabric_id], portion

    def name_as_before(self, store: Store) -> None:
        """Give files that were imported earlier the fabric of that import: the folder may have had another name."""
        if not self._is_named_after_folder:
            return
        known = {job.job_id: job.fabric_id for job in store.jobs() if job.ended_at_s is not None}
        for path in {path for path, job, fabric in self._n_rows if job is None and fabric is None}:
            names = (fabric for job, fabric in known.items() if job == self._job_named(path, [fabric]))
            earlier = next(names, self._default_fabric)
            if earlier != self._default_fabric and self._unnamed_fabrics(path) == [self._default_fabric]:
                self._fabrics[path] = earlier
                words = f"imported before as fabric {earlier}: --fabric-id records it as another one, too"
                self._trace.summary.note(words)
        self._find_owners()

    def _find_owners(self) -> None:
        unnamed = {path: self._job_named(path, self._unnamed_fabrics(path)) for path, job, _ in self._n_rows if not job}
        self._owners = {
            (path, job, fabric): (job or unnamed[path], fabric or self._fabrics.get(path, self._default_fabric))
            for path, job, fabric in self._n_rows
        }
        summary = self._trace.summary
        summary.fabrics = list(dict.fromkeys(fabric for _, fabric in self._owners.values()))
        summary.is_named_after_folder = self._is_named_after_folder and any(
            fabric is None and path not in self._fabrics for path, _, fabric in self._n_rows
        )

    def _unnamed_fabrics(self, path: Path | None) -> list[str]:
        """Fabrics of a file's rows without a job."""
        default = self._fabrics.get(path, self._default_fabric)
        return sorted({fabric or default for at, job, fabric in self._n_rows if at == path and job is None})

    def _job_named(self, path: Path | None, fabrics: list[str]) -> str:
        whole = self._contents[path].copy()
        whole.update(repr(fabrics).encode())
        return f"import-{whole.hexdigest()[:12]}"
