"""The store under faults, one scenario after the other in forked children; store_faults starts it, the shim preloaded.

Reads jobs, a JSON object a line, and answers each with one. Acknowledged batches are those for which `flush` returned
True, those in the store at the beginning, and a backup or repair that has returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlite_utils import Database

from benchmarks.service.power_cut import MARK, Disk, Left, read_log
from zerotune.store.errors import ZerotuneError
from zerotune.store.records import (
    BASELINE,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    ModelRecord,
    Phase,
    StepRecord,
)
from zerotune.store.sqlite import soundness
from zerotune.store.sqlite.backup import back_up
from zerotune.store.sqlite.damage import damage
from zerotune.store.sqlite.database import MEASUREMENT, Retention, Store
from zerotune.store.sqlite.writing import checkpoints, writer

KINDS: Final = ("write", "sync", "rename", "truncate", "unlink", "open", "read", "malloc")
"""As store_faults.c numbers them."""
ROWS: Final = 40
"""Measurements of a batch."""
FIRST: Final = 20
"""Batches that a store has at the beginning, if it has any."""
KEPT_ROWS: Final = 200
"""The limit of retention in the scenario `write`."""
HURRY: Final = (
    (writer, "RETRY_S", 0.01),
    (writer, "LINGER_S", 0.001),
    (writer, "IDLE_S", 0.05),
    (checkpoints, "EVERY_S", 0.0),
    (damage, "EVERY_S", 0.05),
    (damage, "MOST_OF_TIME", 1.0),
)
"""The writer's waits, in seconds."""
HANGS_AFTER_S: Final = 60.0
_TRIES: Final = 5
_KEY: Final = DecisionKey(CommunicatorClass(8, 1), Collective.all_gather, Phase.other, 80)
BACKUP: Final = -1
"""The mark of a backup that has returned."""
SHIM: Final = ctypes.CDLL(None)
PLACE: Final = ctypes.CFUNCTYPE(ctypes.c_char_p)(("faults_place", SHIM))


def rows_of(number: int) -> NDArray[np.void]:
    """The measurements of a batch: each has a number of its own, as its step."""
    block = np.zeros(ROWS, MEASUREMENT)
    step = number * ROWS + np.arange(ROWS)
    block["n_ranks"], block["n_nodes"], block["message_bytes"], block["collective"] = 8, 1, 1024 + step % 7, 2
    block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 8
    block["step"], block["epoch"], block["duration_us"], block["memory_pressure"] = step, number, step + 0.25, 0.5
    return block


def job_of(number: int) -> str:
    """Two jobs take turns."""
    return f"job{number % 2}"


def step_of(number: int) -> StepRecord:
    return StepRecord(number, 1, number + 0.5)


def model_of(number: int) -> ModelRecord:
    """A model for each batch; the next but two replaces it."""
    return ModelRecord(f"model{number % 3}", "fabric", b"%d" % number, {}, "hash", 0.1, 100.0)


class Ledger:
    """The acknowledged batches of a run, and its other findings."""

    def __init__(self, known: Iterable[int] = ()) -> None:
        self.acked = set(known)
        """Batches, and BACKUP."""
        self.tried: set[int] = set()
        self.stall_ms = 0.0
        self.n_given_up = 0
        self.is_stuck = False
        self.errors: list[str] = []

    def told(self, number: int) -> None:
        self.acked.add(number)
        SHIM.faults_mark(ctypes.c_int64(number))

    def record(self, store: Store, number: int) -> None:
        self.tried.add(number)
        records: tuple[Callable[[], None], ...] = (
            lambda: store.record_job(job_of(number), "fabric", {"gpu": "H100"}, 8, f"name{number % 2}"),
            lambda: store.record_measurements("fabric", job_of(number), rows_of(number)),
            lambda: store.record_steps(job_of(number), [step_of(number)]),
            lambda: store.record_decisions([decision_of(number)]),
            lambda: store.save_model(model_of(number)),
        )
        for record in records:
            started_s = time.monotonic()
            record()
            self.stall_ms = max(self.stall_ms, (time.monotonic() - started_s) * 1000)
        for _ in range(_TRIES):
            if store.flush(2.0):
                if not store.n_dropped:
                    self.told(number)
                return
        self.is_stuck = True


def decision_of(number: int) -> Decision:
    return Decision(job_of(number), "fabric", _KEY, BASELINE, number, "keep", f"reason{number}", step=number)


def again(attempt: Callable[[], Any]) -> Any:
    """Repeat a refused attempt, as a user or the daemon's supervisor does."""
    for left in reversed(range(_TRIES)):
        try:
            return attempt()
        except ZerotuneError:
            if not left:
                raise
    return None


def session(path: Path, ledger: Ledger, numbers: Iterable[int], retention: Retention | None = None) -> None:
    """Open the store, record the batches of these numbers, close it. `retention` None: the default."""
    store: Store = again(lambda: Store.open(path, retention=retention))
    try:
        for number in numbers:
            if not ledger.is_stuck:
                ledger.record(store, number)
    finally:
        store.close()
        ledger.n_given_up += store.n_dropped




def write(path: Path, ledger: Ledger) -> None:
    """A new store is made, written, checkpointed, kept within its retention, closed, and opened again."""
    retention = Retention(max_rows_per_fabric=KEPT_ROWS)
    session(path, ledger, range(FIRST, FIRST + 4), retention)
    session(path, ledger, range(FIRST + 4, FIRST + 8), retention)


def resume(path: Path, ledger: Ledger) -> None:
    """A store whose writer was killed is opened, written and looked through."""
    session(path, ledger, range(FIRST, FIRST + 2))
    damage.DamageWatch(path).look()


def migrate(path: Path, ledger: Ledger) -> None:
    """A store of the first schema is brought up to date."""
    session(path, ledger, [FIRST])


def salvage(path: Path, ledger: Ledger) -> None:
    """A damaged store is set aside, and a new one begun with the sound rows."""
    session(path, ledger, [FIRST])


def backup(path: Path, ledger: Ledger) -> None:
    """A store with a log is copied over an older backup."""
    again(lambda: back_up(path, path.with_name("copy.db"), may_overwrite=True))
    ledger.told(BACKUP)


def repair(path: Path, ledger: Ledger) -> None:
    """`zerotune store repair` of a damaged store."""
    again(lambda: soundness.repair(path))
    session(path, ledger, [FIRST])


def running(path: Path, ledger: Ledger) -> None:
    """A store is damaged while it is written."""
    store: Store = again(lambda: Store.open(path))
    try:
        ledger.record(store, FIRST)
        overwrite_page_of(path, 300)
        until_s = time.monotonic() + 5
        while not store.writing.damage and time.monotonic() < until_s:
            time.sleep(0.01)
        ledger.record(store, FIRST + 1)
    finally:
        store.close()
        ledger.n_given_up += store.n_dropped


SCENARIOS: Final = {one.__name__: one for one in (write, resume, migrate, backup, salvage, repair, running)}
MAY_DAMAGE: Final = {"salvage", "repair", "running"}




def overwrite_page_of(path: Path, row: int) -> None:
    """Damage the page of measurements that holds a row; SQLite's locks go by the process, so in another one."""
    if (child := os.fork()) == 0:
        SHIM.faults_stop()
        with path.open("r+b", buffering=0) as file:
            at = file.read().find(struct.pack(">d", row + 0.25)) // 4096 * 4096
            file.seek(max(0, at))
            file.write(b"\xa5" * 4096)
        os._exit(0)
    os.waitpid(child, 0)


def make_templates(folder: Path) -> None:
    for name in SCENARIOS:
        (folder / name).mkdir(mode=0o700)
        path = folder / name / "store.db"
        if name == "write":
            continue
        if (child := os.fork()) == 0:
            ledger = Ledger()
            session(path, ledger, range(FIRST // 2))
            if name == "backup":
                back_up(path, path.with_name("copy.db"))
            store = Store.open(path)
            for number in range(FIRST // 2, FIRST):
                ledger.record(store, number)
            if name not in ("resume", "backup"):  # whose log stays
                store.close()
            if name == "migrate":
                _to_first_schema(path)
            if name in ("salvage", "repair"):
                overwrite_page_of(path, 300)
                overwrite_page_of(path, 600)
            os._exit(0)
        os.waitpid(child, 0)
        path.with_name("store.db.lock").unlink(missing_ok=True)


def _to_first_schema(path: Path) -> None:
    database = Database(path)
    for table, column in (
        ("fabrics", "checksum"),
        ("jobs", "checksum"),
        ("series", "checksum"),
        ("steps", "checksum"),
        ("decisions", "checksum"),
        ("measurements", "checksum"),
        ("jobs", "training"),
        ("jobs", "environment"),
        ("jobs", "failure"),
        ("jobs", "lateness"),
        ("jobs", "passages"),
        ("jobs", "name"),
        ("jobs", "is_lost"),
        ("decisions", "step"),
        ("decisions", "chunk_bytes"),
    ):
        database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    database.execute("DROP TABLE tallies")
    database.execute("DELETE FROM _sqlite_migrations WHERE name != 'm001_first_schema'")
    database.conn.commit()
    database.close()




def judge(scenario: str, path: Path, acked: set[int], rows: set[int]) -> dict[str, Any]:
    """Open the store as the next daemon would, and compare its content with the writes.

    Args:
        path: the store's file.
        acked: batches that were acknowledged, and BACKUP.
        rows: numbers of measurements that were in the store at the beginning.

    Returns:
        Counts of acknowledged rows that are lost and of rows that nobody wrote, and the initial rows that are left.
    """
    with Store.open(path) as store:
        batches = {number for number in acked if number >= 0}
        lost, wrong = _compare(store, batches, rows, KEPT_ROWS if scenario == "write" else None)
        counts: dict[str, Any] = {"lost": lost, "wrong": wrong}
        counts["rows"] = sorted({*store.measurements()["step"].tolist()} & {*range(FIRST * ROWS)})
        if store.set_aside is not None and scenario not in MAY_DAMAGE:
            counts["wrong"] += 1
    if scenario == "backup":
        with Store.open(path.with_name("copy.db"), read_only=True) as copy:
            half = {row for row in rows if row < FIRST // 2 * ROWS}
            is_new = len(copy.measurements()) > len(half)
            lost, wrong = _compare(copy, set(), rows if BACKUP in acked or is_new else half, None)
            counts |= {"lost": counts["lost"] + lost, "wrong": counts["wrong"] + wrong}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        counts["wrong"] += connection.execute("PRAGMA integrity_check").fetchone() != ("ok",)
    return counts


def _compare(store: Store, batches: set[int], rows: set[int], kept_rows: int | None) -> tuple[int, int]:
    found = store.measurements()
    numbers = found["step"].astype(np.int64)
    known = np.concatenate([rows_of(number) for number in range(FIRST + 10)])
    is_known = numbers < len(known)
    wrong = int((~is_known).sum()) + int((known[numbers[is_known]] != found[is_known]).sum())
    there, times = np.unique(numbers, return_counts=True)
    wrong += int((times > 1).sum())
    for number in range(FIRST, FIRST + 10):  # a batch of this run that is there in part
        part = int(((there // ROWS) == number).sum())
        wrong += 0 < part < ROWS and kept_rows is None
    wanted = rows | {row for number in batches for row in range(number * ROWS, (number + 1) * ROWS)}
    if kept_rows is not None:
        newest = max([*there.tolist(), *wanted], default=0)
        wanted = {row for row in wanted if row > newest - kept_rows}
    lost = len(wanted - {*there.tolist()})
    steps = {(job, one.step): one for job in ("job0", "job1") for one in store.steps(job)}
    reasons = [one.reason for one in store.decisions()]
    wrong += len(reasons) - len({*reasons})
    models = {one.name: one for one in store.models()}
    for number in batches:
        if kept_rows is None or number == max(batches):  # with its measurements a job may go
            lost += steps.get((job_of(number), number)) != step_of(number)
            lost += f"reason{number}" not in reasons
        newer = models.get(f"model{number % 3}")
        lost += newer is None or int(newer.blob) < number
    return lost, wrong




def in_a_child(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `do` in a process of its own; `hangs` if that does not end."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        try:
            answer = do()
        except BaseException as error:
            answer = {"errors": [f"{type(error).__name__}: {error}"]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    text, until_s = b"", time.monotonic() + HANGS_AFTER_S
    while select.select([reading], [], [], max(0.0, until_s - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            break
        text += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if text:
        return dict(json.loads(text))
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return {"hangs": 1}
    return {"errors": [f"ended by {status}"]}


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One scenario in `folder`, with one fault or none, and the state afterwards."""
    scenario, rows = job["scenario"], set(job["rows"])
    path, ledger = folder / "store.db", Ledger()
    log = os.open(job["log"], os.O_CREAT | os.O_WRONLY, 0o600) if job.get("log") else -1
    inodes = {one.name: one.stat().st_ino for one in folder.iterdir()}
    sees_malloc = SHIM.faults_watch(str(folder).encode(), log)
    if job.get("kind"):
        SHIM.faults_arm(KINDS.index(job["kind"]), ctypes.c_long(job["at"]), job["errno"], job["how"])
    try:
        SCENARIOS[scenario](path, ledger)
    except ZerotuneError as error:
        ledger.errors.append(f"refused to the last: {error}")
    except Exception as error:
        ledger.errors.append(f"{type(error).__name__}: {error}")
    SHIM.faults_stop()
    counts = [SHIM.faults_count(kind) for kind in range(len(KINDS))]
    answer: dict[str, Any] = {
        "fired": SHIM.faults_fired(),
        "place": PLACE().decode(),
        "hangs": int(ledger.is_stuck),
        "given_up": ledger.n_given_up,
        "stall_ms": ledger.stall_ms,
        "errors": ledger.errors,
        "inodes": inodes,
        "counts": dict(zip(KINDS, counts, strict=True)) if sees_malloc else dict(zip(KINDS[:-1], counts, strict=False)),
    }
    return answer | judge(scenario, path, ledger.acked, rows)


def cut(job: dict[str, Any], templates: Path, scratch: Path) -> dict[str, Any]:
    """Power cuts at the places of a log that the job names.

    Args:
        job: the scenario, its log, the places `at` in it, and the initial folder and inodes.
        templates: initial folders of the scenarios.
        scratch: parent of the folders after a cut.

    Returns:
        The result of `judge` after each.
    """
    changes, places = read_log(Path(job["log"])), set(job["at"])
    begun = Path(job["folder"])
    initial = {name: (templates / job["scenario"] / name).read_bytes() for name in job["inodes"]}
    disk = Disk({inode: (str(begun / name), initial[name]) for name, inode in job["inodes"].items()})
    acked, at = set[int](), 0
    found: list[dict[str, Any]] = []
    for change in changes:
        at += 1
        if change.what == MARK:
            acked.add(change.offset)
        else:
            disk.apply(change)
        if at not in places:
            continue
        for number, left in enumerate(Left):
            with tempfile.TemporaryDirectory(dir=scratch) as name:
                for file, content in disk.after_a_cut(left, at * len(Left) + number).items():
                    target = Path(name) / Path(file).relative_to(begun)
                    target.parent.mkdir(exist_ok=True)
                    target.touch(mode=0o600)
                    target.write_bytes(content)
                path = Path(name) / "store.db"
                one = in_a_child(partial(judge, job["scenario"], path, acked, set(job["rows"])))
                found.append(one | {"what": f"{job['scenario']}: power cut at place {at} of its log, {left.value}"})
    return {"found": found}


def main() -> None:
    logging.disable(logging.CRITICAL)
    for module, name, value in HURRY:
        setattr(module, name, value)
    scratch = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=scratch) as name:  # loads what all children need
        Store.open(Path(name) / "store.db").close()
    templates = scratch / "templates"
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "templates":
            templates.mkdir()
            make_templates(templates)
            answer: dict[str, Any] = {}
        elif job["do"] == "cut":
            answer = cut(job, templates, scratch)
        else:
            folder = Path(job.get("folder") or tempfile.mkdtemp(dir=scratch))
            shutil.copytree(templates / job["scenario"], folder, dirs_exist_ok=True)
            answer = in_a_child(partial(run, job, folder))
            shutil.rmtree(folder)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
