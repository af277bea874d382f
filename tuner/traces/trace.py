"""A trace, in a file or in one file per rank, as blocks, observations or measurements."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from ...store.counted import counted
from ...store.errors import TraceAccessError, TraceError, UserError
from ...store.records import Candidate, Collective, Observation
from ...store.trace_format import TRACE_SUFFIX
from .files import CHUNK_BYTES, opened
from .formats import Format, by_name, detect
from .left_out import LeftOut
from .measuring import Portion, UserFacts, measured, without_impossible
from .own import joined as own_joined
from .own import measurements_csv
from .rank_joining import joined
from .records import MAX_BYTES, Block, Summary, to_observations

Read = TypeVar("Read")
NO_USER_FACTS: Final = UserFacts()

MEASURING_FORMATS: Final = frozenset({"nccl_tests", "nccl_tests_json", "tuner_csv", "measurements_csv", "summary_csv"})
"""Formats whose rows are measured settings, not the calls of a training job."""
_RANK_BY_NAME: Final = frozenset(
    {"flight_recorder", "flight_recorder_pickle", "execution_trace", "chakra"}
)
"""Formats that may have the rank only in the file's name: equal files may be of two ranks."""


class Trace:
    """The records of one or several files of one format; reading is lazy and may be repeated.

    `summary` is complete after all of `blocks`, `observations` or `measurements` has been read.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, Format]],
        collective: Collective | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self._files = files
        self._collective = collective
        self._left_out = left_out
        self._n_others = 0
        self.summary = Summary(collective=collective)
        self.path = files[0][0]
        """The file of the latest records."""
        self.contents: dict[Path | None, hashlib.blake2b] = {}
        """Hash of each file's content in `portions`, without the user's options; under None if files are one trace."""

    @property
    def format_name(self) -> str:
        """Name of the files' format."""
        return self._files[0][1].name

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return [path for path, _ in self._files]

    @property
    def title(self) -> str:
        """The format in words."""
        return self._files[0][1].title

    @property
    def record(self) -> str:
        """One of its records, in words."""
        return self._files[0][1].record

    @property
    def is_measurements(self) -> bool:
        """True if the rows are measured settings (nccl-tests, tuner CSV) that `zerotune store import` stores."""
        return self.format_name in MEASURING_FORMATS

    def refuse_job(self, job_id: str | None) -> None:
        """Raise UserError for a job of a trace whose format does not name jobs; only our own does. None passes."""
        if job_id is not None:
            raise UserError(f"--job {job_id}: {self.title} does not name jobs", "leave it out")

    def blocks(self) -> Iterator[Block]:
        """The records in the files' order, in arrays of at most 64 Ki rows.

        Damaged files are counted and named; TraceError if no file can be read.
        """
        self._begin()
        yield from self._of_files(self._blocks_of)
        self._note_collective()

    def _begin(self) -> None:
        self.summary = Summary(collective=self._collective)
        self.contents = {}
        self._n_others = 0
        if self._left_out:
            named = ", ".join(self._left_out[:3]) + (" ..." if len(self._left_out) > 3 else "")
            self.summary.fault(f"left out {counted(len(self._left_out), 'file')}, no trace: {named}")

    def _of_files(
        self, read: Callable[[Path, Format], Iterator[Read]], files: Sequence[tuple[Path, Format]] | None = None
    ) -> Iterator[Read]:
        refusals, files = 0, self._files if files is None else files
        for path, file_format in files:
            try:
                yield from read(path, file_format)
                self.summary.n_files += 1
            except TraceError as error:
                refusals += 1
                if refusals == len(files):
                    raise
                self.summary.skip(LeftOut.damaged_file)
                self.summary.fault(error.problem)

    def _blocks_of(self, path: Path, file_format: Format) -> Iterator[Block]:
        for block in file_format.read(path, self.summary):
            self.path = path
            sane = (block["message_bytes"] <= MAX_BYTES) & (block["message_bytes"] > 0)
            if not bool(sane.all()):
                self.summary.skip(LeftOut.no_bytes, int((~sane).sum()))
                block = block[sane]
            if self.is_measurements and self.format_name != "measurements_csv":  # a job's calls really ran
                block = without_impossible(block, self.summary)
            if len(block):
                self.summary.count(block)
                if self._collective is not None:
                    self._n_others += int((block["collective"] != self._collective).sum())
                yield block

    def _note_collective(self) -> None:
        if self._n_others and self._collective is not None:
            self.summary.note(
                f"the file says which collective ran: --collective {self._collective.name} was not used for"
                f" {self._n_others:,} records"
            )

    def observations(self) -> Iterator[Observation]:
        """The records one by one; unknown values are None."""
        for block in self.blocks():
            yield from to_observations(block)

    def portions(self, user_facts: UserFacts = NO_USER_FACTS) -> Iterator[Portion]:
        """The trace's measurements by job and fabric, in blocks of at most 64 Ki rows.

        Traces of jobs are joined over their ranks: one row per collective. Records without a duration, ranks, nodes or
        setting that the file or the user names are counted as unusable.

        Raises:
            UserError: the user's facts contradict these records.
        """
        self._begin()
        for portion in self._portions(user_facts):
            rows = without_impossible(portion.rows, self.summary)  # the user's facts count, too
            if len(rows):
                yield replace(portion, rows=rows)
        self._note_collective()

    def _portions(self, user_facts: UserFacts) -> Iterator[Portion]:
        if self.format_name == "zerotune":
            of_file = dict(self._files)
            read = own_joined.portions(
                self.paths, lambda path: self._blocks_of(path, of_file[path]), user_facts, self.summary
            )
            for portion in read:
                self._found(None, portion.rows.tobytes())
                yield portion
        elif self.format_name == "measurements_csv":
            yield from self._of_files(
                lambda path, _: measurements_csv.portions(path, user_facts, self.summary, partial(self._found, path))
            )
        elif self.is_measurements:
            yield from self._of_files(lambda *file: self._measured(self._blocks_of(*file), user_facts, file[0]))
        else:
            blocks = self._of_files(self._blocks_of, self._without_copies())
            calls = list(joined(blocks, self.summary))
            shapes = {shape for block in calls for shape in np.unique(block[["n_ranks", "n_nodes"]]).tolist()}
            yield from self._measured(iter(calls), user_facts, None, is_one_shape=len(shapes) == 1)

    def _without_copies(self) -> list[tuple[Path, Format]]:
        """The files without copies; equal files are copies, as two ranks never measure exactly the same."""
        if self.format_name in _RANK_BY_NAME:
            return list(self._files)
        sizes = Counter(_n_bytes(path) for path, _ in self._files)
        first: dict[bytes, Path] = {}
        kept = []
        for path, file_format in self._files:
            same = first.setdefault(_digest(path), path) if sizes[_n_bytes(path)] > 1 else path
            if same == path:
                kept.append((path, file_format))
            else:
                self.summary.note(f"{path.name} holds the same as {same.name}: it was used once")
        return kept

    def _measured(
        self, blocks: Iterator[Block], user_facts: UserFacts, path: Path | None, *, is_one_shape: bool = True
    ) -> Iterator[Portion]:
        for block in blocks:
            self._found(path, block.tobytes())
            yield Portion(measured(block, user_facts, self.summary, is_one_shape=is_one_shape), path=path)

    def _found(self, path: Path | None, content: bytes) -> None:
        self.contents.setdefault(path, hashlib.blake2b()).update(content)

    def measurements(
        self,
        setting: Candidate | None = None,
        *,
        is_default: bool = False,
        n_nodes: int | None = None,
        n_ranks: int | None = None,
    ) -> Iterator[Block]:
        """The rows of `portions` without their jobs and fabrics: MEASUREMENT, shape (n,), n at most 64 Ki.

        The arguments are the fields of `UserFacts`.
        """
        for portion in self.portions(UserFacts(setting, is_default, n_nodes, n_ranks)):
            yield portion.rows


def read_trace(path: str | Path, format_name: str | None = None, *, collective: Collective | None = None) -> Trace:
    """The trace in a file, or in a folder with one file per rank; its records are read and checked later.

    `collective` is the collective that ran, for files that do not name it. Raises TraceError if there is no file, the
    format is unknown, or files have several formats.
    """
    path = Path(path)
    given = None if format_name is None else by_name(format_name)
    if not path.is_dir():
        if given is not None and not path.exists():
            raise TraceError(f"{path} does not exist", "name a trace file or a directory of them")
        return Trace([(path, given or detect(path))], collective)
    files: list[tuple[Path, Format]] = []
    left_out: list[str] = []
    refusals: list[TraceError] = []
    try:
        inside = sorted(path.iterdir(), key=_natural)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}", "check the folder's permissions") from None
    for file in inside:
        if not file.is_file() or file.name.startswith("."):
            continue
        try:
            files.append((file, given or detect(file)))
        except TraceError as error:
            left_out.append(file.name)  # a README beside the traces, for example
            refusals.append(error)
    denied = [error for error in refusals if isinstance(error, TraceAccessError)]
    own = [error for name, error in zip(left_out, refusals, strict=True) if name.endswith(TRACE_SUFFIX)]
    if not files and (denied or own or len(refusals) == 1):
        raise [*denied, *own, *refusals][0]
    if not files:
        raise TraceError(f"{path} holds no trace of a known format", "docs/reference/formats.md lists the formats")
    first = {file_format.name: file for file, file_format in reversed(files)}
    if len(first) > 1:
        named = ", ".join(f"{name} ({first[name].name})" for name in sorted(first))
        raise TraceError(f"{path} holds traces of several formats: {named}", "name one file or one format")
    return Trace(files, collective, left_out)


def _n_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it will raise the error


def _digest(path: Path) -> bytes:
    digest = hashlib.blake2b()
    try:
        with opened(path) as file:
            while piece := file.read(CHUNK_BYTES):
                digest.update(piece)
    except TraceError:
        return str(path).encode()  # damaged: reading it will raise the error
    return digest.digest()


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key under which rank 2 comes before rank 10."""
    digits = ""
    key: list[tuple[int, str]] = []
    for char in path.name + "\0":
        if char.isascii() and char.isdigit():
            digits += char
            continue
        if digits:
            key.append((int(digits[:18]), ""))
            digits = ""
        key.append((-1, char))
    return key
