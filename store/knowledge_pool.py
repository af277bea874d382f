"""What users of one node have measured, in a folder that they share.

Each writes files of their own, one for each fabric, and reads those of the others: statistics of settings, without
names, jobs or times of day. What others wrote is checked like all that comes from outside, and it speaks only where
this user has measured nothing (`Knowledge`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from zerotune.store.atomic_file import atomic_write
from zerotune.store.records import LEAST_US, CandidateStatistics, DecisionKey

_log = logging.getLogger("zerotune.knowledge_pool")

VERSION: Final = 1
MAX_FILE_BYTES: Final = 64 * 2**20
MAX_USERS: Final = 256
MAX_US: Final = 1e9
MAX_CALLS: Final = 10**9


class Shared(msgspec.Struct, frozen=True):
    """What one user knows of one fabric."""

    version: int
    fabric_id: str
    statistics: list[CandidateStatistics]
    """Of all their jobs."""
    by_job: list[list[CandidateStatistics]]
    """Of each of their newest jobs."""


class KnowledgePool:
    """The shared folder, as one user's daemon sees it.

    Args:
        folder: which has a folder for each user, named by their number and theirs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(
        self, fabric_id: str, statistics: Sequence[CandidateStatistics], by_job: Sequence[Sequence[CandidateStatistics]]
    ) -> None:
        """Let the others know; where that is not possible, they know less.

        Args:
            fabric_id: of the fabric.
            statistics: of all jobs of this user on it.
            by_job: of each of the newest.
        """
        if not statistics:
            return
        told = Shared(VERSION, fabric_id, _undated(statistics), [_undated(lines) for lines in by_job])
        path = self._folder / str(os.getuid()) / _name(fabric_id)
        try:
            with atomic_write(path) as partial:
                partial.write_bytes(msgspec.msgpack.encode(told))
                partial.chmod(0o644)
        except OSError as error:
            _log.warning("what was measured cannot be shared in %s: %s", path, error.strerror)

    def with_others(
        self, fabric_id: str, statistics: list[CandidateStatistics], by_job: list[list[CandidateStatistics]]
    ) -> tuple[list[CandidateStatistics], list[list[CandidateStatistics]]]:
        """Add what others measured at keys where this user has measured nothing.

        At each key one of them speaks, who has measured most: durations of different users are not compared.

        Args:
            fabric_id: of the fabric.
            statistics: of all jobs of this user on it.
            by_job: of each of the newest.

        Returns:
            Both, with the others'.
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
        """What the others know of a fabric; what cannot be trusted is left out, and logged."""
        try:
            users = sorted(int(name) for name in os.listdir(self._folder) if name.isascii() and name.isdigit())
        except OSError:
            return []
        found = (self._of_user(uid, fabric_id) for uid in users[:MAX_USERS] if uid != os.getuid())
        return [one for one in found if one is not None]

    def _of_user(self, uid: int, fabric_id: str) -> Shared | None:
        path = self._folder / str(uid) / _name(fabric_id)
        try:
            shared = msgspec.msgpack.decode(_read(path, uid), type=Shared)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s is not used: %s", path, error)
            return None
        if shared.version != VERSION or shared.fabric_id != fabric_id:
            return None
        if not all(map(_is_possible, [line for lines in (shared.statistics, *shared.by_job) for line in lines])):
            _log.warning("%s is not used: a number in it is impossible", path)
            return None
        return shared


def _read(path: Path, uid: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid:
            raise ValueError("it is no file of that user")
        if found.st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has {found.st_size:,} bytes")
        return file.read(MAX_FILE_BYTES)


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
    return [msgspec.structs.replace(line, last_seen_s=0.0) for line in lines if _is_possible(line)]


def _name(fabric_id: str) -> str:
    return hashlib.sha256(fabric_id.encode()).hexdigest()[:32] + ".msgpack"
