"""nccl-tests' printed tables, alone or inside a log or a Markdown file; several runs in one file.

Sizes are total bytes. Out-of-place and in-place times become two records. The collective and the hosts come from the
header of the run, the number of ranks from its lines and from the ratio of bandwidths (`rank_count.py`). Forced
settings come only from NCCL's own remark that the environment set them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from ....agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from ....store.errors import TraceError, UserError
from ....store.records import BASELINE, Candidate, Collective, Observation, TimingSource
from ..csv_rows import value_in
from ..files import line_chunks
from ..left_out import LeftOut
from ..rank_count import RunRanks
from ..records import BLOCK_ROWS, FLAG_FORCED, MAX_CHANNELS, Block, SequenceNumbers, Summary, blocks_of, datatype_index
from .nccl_tests_runs import contradiction, fits, forced_setting, is_right, named_in, with_ranks
from .plain_lines import PlainLines

_NUMBER: Final = rb"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_ROW_BEGUN: Final = re.compile(rb"^\s*(\d+)\s+\d+\s+([a-z_]\w*)\s+(?:[a-z]\w*\s+)?-1")
_ROW_KIND: Final = re.compile(rb"^\s*\d+\s+\d+\s+([a-z]\w*)(?:\s|$)")
_BODY: Final = re.compile(rb"\s+(%b)\s+(%b)\s+(%b)\s+(\d+|N/A)" % (3 * (_NUMBER,)))
_SELECTED: Final = re.compile(rb"Bytes ?-> Algo (\w+) +proto (\w+) +channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\}")
_RANK: Final = re.compile(rb"^\W*Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_RUN: Final = re.compile(rb"^\W*(?:nThread \d|nccl-tests version)")
_STARTING: Final = re.compile(rb"^\W*Collective test starting: (\w+)")
_CONCLUDED: Final = b"Collective test concluded"
_OTHER_UNIT: Final = re.compile(rb"\(B\).*?\((m?sec|[mn]?s)\)")
_NOT_MEASURED: Final = re.compile(rb"N/A\b|# |.*NCCL INFO")
"""The rest of a row with only one measured side, or that NCCL's own lines interrupt."""
_COUNT_AND_KIND: Final = re.compile(rb"(?<!\S)\d\S*\s+([a-z]\w*)(?:\s|$)")
_FEWEST_NUMBERS: Final = 5
"""Numbers in each row: size, count, time and two bandwidths."""
_MARKDOWN: Final = bytes.maketrans(b"|*", b"  ")
_HEADER_WORDS: Final = (b"Rank", b"nThread", b"nccl-tests version", b"Collective test", b"algbw")
"""Each line of a header has one of these; a log pasted into a text may have lost the # before it."""
_PROGRAM: Final = re.compile(rb"(?<![\w.-])([a-zA-Z]\w{0,40}?_perf)\w{0,40}(?![\w/-]|\.\w)")
_GROUPED: Final = re.compile(rb" agg iters: (\d{1,9})")
_FORCED: Final = re.compile(rb"NCCL_(ALGO|PROTO) set by environment to (\S+)")
GROUPED: Final = "several collectives were grouped per iteration (-m): NCCL chose for them together, perhaps fused"


@lru_cache
def _row(has_root: bool, n_extra: int) -> re.Pattern[bytes]:
    """Pattern of a row. Before version 2.11 rows have no root, and whole microseconds must not be read as one.

    `n_extra` columns follow each count of wrong results (-I and bitwise checks).
    """
    body = rb"\s+(%b)\s+(%b)\s+(%b)\s+(\S+)" % (3 * (_NUMBER,)) + rb"(?:\s+\S+){%d}" % n_extra
    root = rb"(?:\s+-?\d+)?" if has_root else b""
    return re.compile(rb"^\s*(\d+)\s+\d+\s+([a-z_]\w*)(?:\s+([a-z]\w*))?%b%b(?:%b)?\s*(.*)" % (root, body, body))


def matches(begin: bytes) -> bool:
    """Whether the file has a table's heading, or the first lines of a run."""
    return (b"algbw" in begin and b"busbw" in begin) or b"nThread " in begin or b"# nccl-tests version" in begin


@dataclass
class _Split:
    """A row with NCCL's own lines between its parts, and NCCL's logged choice for it."""

    message_bytes: int
    datatype: bytes
    settings: set[tuple[bytes, bytes, int]] = field(default_factory=set)


@dataclass
class _Run(RunRanks):
    """Facts from the lines before a table."""

    collective: Collective | None = None
    is_unknown_program: bool = False
    """Whether the run names a program that is no collective."""
    is_other: bool = False
    """Whether the run's last line names another collective than the one assumed for its rows."""
    in_header: bool = True
    in_table: bool = False
    """Whether the current line is within a table."""
    nccl_algo: str = ""
    """NCCL_ALGO by NCCL's own log line."""
    nccl_proto: str = ""
    split: _Split | None = None
    has_root: bool = True
    """Whether rows name a root (-1 for none) before the times."""
    n_extra: int = 0
    """Columns after the wrong results, for each of out of place and in place."""
    is_cpu_time: bool = False

    def names(self, *programs: bytes) -> None:
        """Find the collective from the programs that a line names."""
        known = (find_collective(program.decode()) for program in programs)
        self.collective = next((one for one in known if one is not None), None)
        self.is_unknown_program = self.collective is None

    @property
    def is_forced(self) -> bool:
        """Whether NCCL logged that the environment set part of the setting."""
        return bool(self.nccl_algo or self.nccl_proto)

    def setting(self) -> tuple[Candidate, int]:
        """The setting that ran and its channels, if the log has it; otherwise the baseline."""
        if self.split is not None and len(self.split.settings) == 1:
            algorithm, protocol, n_channels = next(iter(self.split.settings))
            try:
                ran = Candidate(parse_algorithm(algorithm.decode()), parse_protocol(protocol.decode()))
            except UserError:
                return BASELINE, 0
            return ran, n_channels if 0 < n_channels <= MAX_CHANNELS else 0
        return forced_setting(self.nccl_algo, self.nccl_proto, self.collective), 0


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """Two records per row of a table."""
    reader = _Reader(_Run(collective=named_in(path) or summary.collective), path.name, summary)
    for chunk in line_chunks(path, summary):
        yield from reader.blocks(chunk)
    yield from reader.rest()


@dataclass
class _Reader:
    """Reads a file's lines, and keeps facts that later lines need."""

    run: _Run
    file_name: str
    summary: Summary
    counters: SequenceNumbers = field(default_factory=SequenceNumbers)
    n_runs: int = 0
    plain: PlainLines = field(default_factory=PlainLines)
    held: list[Block] = field(default_factory=list)
    """Records of the current run, whose number of ranks is known at its end, unless it is long."""

    def blocks(self, chunk: bytes) -> Iterator[Block]:
        """The records that are complete after a piece of the file."""
        observations: list[Observation] = []
        for line in filter(None, self.plain.of(chunk).split(b"\n")):
            if self._begins_run(line):
                self.held += blocks_of(iter(observations))
                yield from self.rest()
                observations = []
                self.n_runs += 1
                self.run = _Run(collective=self.run.collective, is_unknown_program=self.run.is_unknown_program)
            observations += self._line(line)
        self.held += blocks_of(iter(observations))
        if sum(map(len, self.held)) >= BLOCK_ROWS:
            yield from self.rest()

    def rest(self) -> Iterator[Block]:
        """The held records, with all known facts of the run."""
        run = self.run
        if run.is_other:
            self.summary.skip(LeftOut.other_collective, sum(map(len, self.held)))
            self.held = []
        for block in self.held:
            if run.count is None:
                self.summary.note_ranks(run.compared(run.collective), self.file_name)
            with_ranks(block, run, self.n_runs)
            if run.is_forced:
                block["flags"] |= FLAG_FORCED
            yield block
        self.held = []

    def _begins_run(self, line: bytes) -> bool:
        if self.run.in_header:
            return False
        is_header = (b"Rank" in line and _RANK.match(line)) or (b"n" in line and _RUN.match(line)) or _is_heading(line)
        return bool(is_header or (_programs(line) and _CONCLUDED not in line))

    def _line(self, line: bytes) -> Iterator[Observation]:
        run = self.run
        row = _row(run.has_root, run.n_extra).match(line)
        if row is None and run.in_table and (b"|" in line or b"**" in line):
            row = _row(run.has_root, run.n_extra).match(line.translate(_MARKDOWN))
        if row is not None:
            run.in_header = False
            if not fits(run.collective, row[3]):
                self.summary.skip(LeftOut.other_collective)
                return
            bodies = (row.groups()[3:7], row.groups()[7:11])
            yield from self._records(int(row[1][:18]), row[2], bodies)
            if row[8] is None and row[12] and not _NOT_MEASURED.match(row[12]):
                self._skip(LeftOut.damaged_row, line)
            return
        if run.split is not None and (parts := _bodies(line)):
            yield from self._records(run.split.message_bytes, run.split.datatype, parts)
            return
        if _is_damaged(line, in_table=run.in_table):
            self._skip(LeftOut.damaged_row, line)
            return
        if b"NCCL INFO" in line:
            _interleaved(line, run)
        programs = _programs(line)
        if programs and _CONCLUDED in line:
            run.is_other = run.collective is not None and run.collective is not find_collective(programs[0].decode())
        elif programs:
            run.names(*programs)
        if b"algbw" in line and b"busbw" in line:
            self.summary.columns_found = _words(line)
        if line.startswith(b"#") or any(word in line for word in _HEADER_WORDS):
            unit = _OTHER_UNIT.search(line) if run.in_table else None
            if unit is not None:
                raise TraceError(
                    f"{self.file_name} gives its times in {unit[1].decode()} ({_words(line)})",
                    "give them in microseconds, as nccl-tests prints them",
                )
            _header_line(line, run, self.summary)
        elif b"set by environment" in line and (forced := _FORCED.search(line)) is not None:
            value = forced[2].decode("utf-8", "replace").rstrip(".")
            run.nccl_algo, run.nccl_proto = (value, run.nccl_proto) if forced[1] == b"ALGO" else (run.nccl_algo, value)

    def _skip(self, reason: LeftOut, line: bytes) -> None:
        self.summary.skip(reason, 1, f"{value_in('row', _words(line))} in {self.file_name}")

    def _records(
        self, message_bytes: int, datatype: bytes, bodies: Iterable[Sequence[bytes | None]]
    ) -> Iterator[Observation]:
        """A row's records; each of `bodies` is a time, two bandwidths and the wrong results."""
        run = self.run
        if message_bytes == 0 or run.is_cpu_time or run.collective is None:
            unnamed = LeftOut.unknown_program if run.is_unknown_program else LeftOut.collective_unknown
            reason = LeftOut.cpu_time if run.is_cpu_time else unnamed
            self.summary.skip(LeftOut.size_zero if message_bytes == 0 else reason)
            return
        setting, n_channels = run.setting()
        for time_text, algbw, busbw, wrong_text in bodies:
            if time_text is None:
                continue
            duration_us = float(time_text)
            if not is_right(wrong_text):
                self.summary.skip(LeftOut.wrong_result)
                continue
            if not 0 < duration_us < 1e12:
                self.summary.skip(LeftOut.row_without_time)
                continue
            if algbw is not None and (wrong := contradiction(message_bytes, duration_us, float(algbw))):
                self.summary.skip(LeftOut.contradicting_time, 1, f"{wrong} in {self.file_name}")
                continue
            if algbw is not None and busbw is not None:
                run.saw([(float(algbw), float(busbw))])
            yield Observation(
                sequence=self.counters.next(self.n_runs, run.collective),
                collective=run.collective,
                message_bytes=message_bytes,
                n_ranks=0,
                datatype=datatype.decode(),
                algorithm=setting.algorithm,
                protocol=setting.protocol,
                n_channels=n_channels or None,
                duration_us=duration_us,
                timing_source=TimingSource.reported,
            )


def _words(line: bytes) -> str:
    return " ".join(line[:1000].decode("utf-8", "replace").strip("# ").split())


def _programs(line: bytes) -> list[bytes]:
    return _PROGRAM.findall(line) if b"_perf" in line and b"NCCL INFO" not in line else []


def _is_heading(line: bytes) -> bool:
    return b" algbw " in line and b" busbw " in line


def _header_line(line: bytes, run: _Run, summary: Summary) -> None:
    rank = _RANK.match(line)
    if rank is not None:
        run.ranks[int(rank[1])] = int(rank[2] or 0), rank[3].decode("utf-8", "replace")
    if _is_heading(line):
        run.in_table = True
        run.has_root = b" root " in line
        names = line.split()
        times = [place for place, name in enumerate(names) if name in (b"time", b"cputime")]
        run.n_extra = min(max(0, times[1] - times[0] - 4), 16) if len(times) == 2 else 0
        run.is_cpu_time = b"cputime" in names
    grouped = _GROUPED.search(line)
    if grouped is not None and int(grouped[1]) > 1:
        summary.note(GROUPED)
    starting = _STARTING.match(line)
    if starting is not None:
        run.names(starting[1])
    if line.startswith(b"# Out of bounds"):
        run.in_header, run.in_table, run.split = False, False, None


def _interleaved(line: bytes, run: _Run) -> None:
    """Read a line between the parts of a row; with NCCL_DEBUG, NCCL logs the setting there."""
    begun = _ROW_BEGUN.match(line)
    if begun is not None:
        run.split = _Split(int(begun[1][:18]), begun[2])
    selected = _SELECTED.search(line)
    if run.split is not None and selected is not None:
        run.split.settings.add((selected[1], selected[2], int(selected[4]) - int(selected[3]) + 1))


def _bodies(line: bytes) -> list[tuple[bytes, ...]]:
    """Times, bandwidths and wrong results of an interrupted row's next part; the line's rest is NCCL's."""
    bodies: list[tuple[bytes, ...]] = []
    at = 0
    while (found := _BODY.match(line, at)) is not None:
        wrong = b"0" if b"NCCL INFO" in line and found[4].startswith(b"0") else found[4]
        bodies.append((found[1], found[2], found[3], wrong))
        at = found.end()
    return bodies


def _is_damaged(line: bytes, *, in_table: bool) -> bool:
    """Whether a line is a damaged row: it begins like a row, or is in a table and has a row's middle."""
    if b"NCCL INFO" in line or line.startswith(b"#"):
        return False
    begun = _ROW_KIND.match(line)
    if not in_table or begun is not None:
        return begun is not None and datatype_index(begun[1].decode()) is not None
    counted = _COUNT_AND_KIND.search(line.translate(_MARKDOWN))
    words = line.split()
    n_numbers = sum(word[:1].isdigit() for word in words)
    is_kind = counted is not None and datatype_index(counted[1].decode()) is not None
    return is_kind or (n_numbers >= _FEWEST_NUMBERS and 2 * n_numbers > len(words))


