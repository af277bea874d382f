"""Measurements of all users of one node, in a folder that they share.

Each user writes one file per fabric and reads those of the others: statistics of settings, without names, jobs or
times of day. Files of others are checked like all input from outside, and count only at keys that this user has not
measured (`Knowledge`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...store.atomic_file import atomic_write
from ...store.errors import reason
from ...store.foreign.decoding import Decoding, Undecodable
from ...store.foreign.regular_file import read_file
from ...store.records import LEAST_US, CandidateStatistics, DecisionKey

_log = logging.getLogger("zerotune.knowledge_pool")

VERSION: Final = 1
MAX_FILE_BYTES: Final = 16 * 2**20
MAX_USERS: Final = 256
MAX_JOBS: Final = 1024
"""Most jobs of one user."""
MAX_LINES: Final = 50_000
"""Most lines of one user."""
MAX_ALL_LINES: Final = 200_000
"""Most lines of all users together; a user whose lines would exceed it is left out."""
MEMORY_MIB: Final = 512
DECODE_S: Final = 10.0
"""Time to decode one file."""
ALL_S: Final = 30.0
"""Time to decode all files."""
MAX_US: Final = 1e9
MAX_CALLS: Final = 10**9


class Shared(msgspec.Struct, frozen=True):
    """One user's statistics of one fabric."""

    version: int
    fabric_id: str
    statistics: list[CandidateStatistics]
    """Statistics over all jobs of the user."""
    by_job: list[list[CandidateStatistics]]
    """Statistics of each of the user's newest jobs."""


class KnowledgePool:
    """The shared folder, as one user's daemon sees it.

    It has a folder for each user, named by the uid and owned by that user.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(
        self, fabric_id: str, statistics: Sequence[CandidateStatistics], by_job: Sequence[Sequence[CandidateStatistics]]
    ) -> None:
        """Write this user's statistics for the others; a failure is only logged."""
        if not statistics:
            return
        shared = Shared(VERSION, fabric_id, _undated(statistics), [_undated(lines) for lines in by_job])
        path = self._folder / str(os.getuid()) / _name(fabric_id)
        try:
            with atomic_write(path) as partial:
                partial.write_bytes(msgspec.msgpack.encode(shared))
                partial.chmod(0o644)
        except OSError as error:
            _log.warning("what was measured cannot be shared in %s: %s", path, error.strerror)

    def with_others(
        self, fabric_id: str, statistics: list[CandidateStatistics], by_job: list[list[CandidateStatistics]]
    ) -> tuple[list[CandidateStatistics], list[list[CandidateStatistics]]]:
        """Add others' measurements at keys that this user has not measured.

        Each key takes the statistics of the user with most measurements: durations of different users are not compared.
        """
        own = {line.key for line in statistics}
        calls: dict[DecisionKey, Counter[int]] = {}
        others = self.others(fabric_id)
        for index, shared in enumerate(others):
            for line in shared.statistics:
                if line.key not in own:
                    calls.setdefault(line.key, Counter())[index] += line.count
        speakers = {key: counts.most_common(1)[0][0] for key, counts in calls.items()}
        statistics, by_job = list(statistics), list(by_job)
        for index, shared in enumerate(others):
            statistics += [line for line in shared.statistics if speakers.get(line.key) == index]
            by_job += [[line for line in lines if speakers.get(line.key) == index] for lines in shared.by_job]
        return statistics, by_job

    def others(self, fabric_id: str) -> list[Shared]:
        """The others' statistics of a fabric; files that cannot be trusted are left out and logged."""
        try:
            users = sorted(int(name) for name in os.listdir(self._folder) if name.isascii() and name.isdigit())
        except OSError:
            return []
        found: list[Shared] = []
        n_lines, ends_at_s = 0, time.monotonic() + ALL_S
        function = f"{__name__}:checked"
        with Decoding(function, memory_mib=MEMORY_MIB, seconds=DECODE_S, most_bytes=MAX_FILE_BYTES) as decode:
            for uid in users[:MAX_USERS]:
                is_read = uid != os.getuid() and time.monotonic() < ends_at_s
                shared = None if not is_read else self._of_user(uid, fabric_id, decode)
                if shared is None:
                    continue
                n_its = sum(len(lines) for lines in (shared.statistics, *shared.by_job))
                if n_its > MAX_LINES:
                    _log.warning("user %d shares more in %s than is read: it is not used", uid, self._folder)
                    continue
                n_lines += n_its
                if n_lines > MAX_ALL_LINES or time.monotonic() > ends_at_s:
                    _log.warning(
                        "users share more in %s than is read: from user %d on it is not used", self._folder, uid
                    )
                    break
                found.append(shared)
        return found

    def _of_user(self, uid: int, fabric_id: str, decode: Decoding) -> Shared | None:
        path = self._folder / str(uid) / _name(fabric_id)
        try:
            data = decode(fabric_id, read_file(path, MAX_FILE_BYTES, owner=uid, follow=False))
            return msgspec.msgpack.decode(data, type=Shared) if data else None
        except FileNotFoundError:
            return None
        except (OSError, Undecodable) as error:
            _log.warning("%s is not used: %s", path, reason(error))
            return None


def checked(fabric_id: str, data: bytes) -> bytes:
    """A file's statistics of a fabric, checked; empty if the file is of another fabric or version.

    Raises ValueError if the file is damaged or has impossible numbers.
    """
    shared = msgspec.msgpack.decode(data, type=Shared)
    if shared.version != VERSION or shared.fabric_id != fabric_id:
        return b""
    if len(shared.by_job) > MAX_JOBS or sum(map(len, (shared.statistics, *shared.by_job))) > MAX_LINES:
        raise ValueError(f"it has more than {MAX_JOBS:,} jobs or {MAX_LINES:,} lines")
    if not all(map(_is_possible, [line for lines in (shared.statistics, *shared.by_job) for line in lines])):
        raise ValueError("a number in it is impossible")
    return msgspec.msgpack.encode(shared)


def _is_possible(line: CandidateStatistics) -> bool:
    times_us = (line.median_us, line.mean_us, line.min_us)
    return (
        all(LEAST_US <= one_us <= MAX_US for one_us in times_us)
        and 0.0 <= line.std_us <= MAX_US
        and 0.0 <= line.level_std <= 10.0
        and 0 < line.count <= MAX_CALLS
        and math.isfinite(line.last_seen_s)
    )


def _undated(lines: Iterable[CandidateStatistics]) -> list[CandidateStatistics]:
    # Older readers would take a setting with a chunk size for the one without.
    plain = (line for line in lines if _is_possible(line) and not line.candidate.chunk_bytes)
    return [msgspec.structs.replace(line, last_seen_s=0.0) for line in plain]


def _name(fabric_id: str) -> str:
    return hashlib.sha256(fabric_id.encode()).hexdigest()[:32] + ".msgpack"
