"""Checks of the runtime folder, the daemon, its store and its keys."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Final

from ...agent.daemon_link.node_service import has_service
from ...store.counted import counted
from ...store.errors import UserError
from ...store.paths import check_endpoint, is_private, runtime_dir
from ...store.private_folders import open_socket_folder
from ...store.sqlite.damage.damage import remedy
from ...store.sqlite.database import Store
from ..client.holders import holder_of
from ..client.status import fetch_status, no_answer
from .findings import Finding, Machine, may_be_made, of_error, ok, problem, warning

ANSWER_TIMEOUT_S: Final = 2.0
LITTLE_ROOM_BYTES: Final = 10**9
NO_ROOM_BYTES: Final = 16 * 10**6
OTHERS: Final = 0o077


def runtime_folder(machine: Machine) -> Finding:
    """Whether the folder of the daemon's socket belongs to this user alone."""
    folder = runtime_dir()
    try:
        os.close(open_socket_folder(folder))
    except UserError as error:
        return of_error("runtime_folder", error)
    except FileNotFoundError:
        if may_be_made(folder):
            return ok("runtime_folder", f"{folder}, which the daemon will make{_instead_of()}")
        return problem("runtime_folder", f"{folder} cannot be made", "name another in ZEROTUNE_RUNTIME_DIR")
    except OSError as error:
        return problem("runtime_folder", f"{folder}: {error.strerror}", "name another in ZEROTUNE_RUNTIME_DIR")
    return ok("runtime_folder", f"{folder}, of this user alone{_instead_of()}")


def _instead_of() -> str:
    """Text about the session's folder if another one is used instead."""
    session = os.environ.get("XDG_RUNTIME_DIR")
    if not session or os.environ.get("ZEROTUNE_RUNTIME_DIR") or is_private(Path(session)):
        return ""
    try:
        what = f"has mode {stat.S_IMODE(Path(session).stat().st_mode):04o} or is another user's"
    except OSError as error:
        what = f"cannot be used ({error.strerror})"
    return f"; XDG_RUNTIME_DIR {session} {what}, where 0700 is wanted"


def daemon(machine: Machine) -> Finding:
    """Whether a daemon answers."""
    where = machine.endpoint
    try:
        check_endpoint(where)
        reply = fetch_status(where, timeout_s=ANSWER_TIMEOUT_S, curve_dir=machine.keys_dir)
    except UserError as error:
        return of_error("daemon", error)
    if reply is None:
        if (holder := holder_of(where)) is not None:
            return of_error("daemon", no_answer(where, holder))
        if has_service():
            return ok("daemon", "none of yours yet: the node's service for all users starts one for `zerotune launch`")
        if where.startswith("tcp://"):
            return of_error("daemon", no_answer(where, None))
        return ok("daemon", f"none at {where}: `zerotune launch` starts one")
    found = f"pid {reply.daemon_pid} at {where}, {counted(len(reply.jobs), 'job')}"
    if reply.health != "ok":
        return warning("daemon", f"{found}: {reply.health}", "`zerotune status` says why")
    return ok("daemon", found)


def store(machine: Machine) -> Finding:
    """Whether the store opens, its contents, and the free space on its disk."""
    path = machine.store_path
    if not path.exists():
        if may_be_made(path.parent):
            return _with_room(path, f"none yet at {path}: the first daemon makes it")
        return problem("store", f"none at {path}, and its folder cannot be written", "name another with --store")
    try:
        with Store.open(path, read_only=True) as opened:
            n_jobs, n_measurements = len(opened.jobs()), opened.count_measurements()
            found = f"{path}: {counted(n_jobs, 'job')}, {counted(n_measurements, 'measurement')}"
    except UserError as error:
        return of_error("store", error)
    except sqlite3.Error as error:
        return problem("store", f"{path}: {error}", remedy(path))
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return problem("store", f"{path} or its folder cannot be written", "name another with --store")
    n_bytes = sum(side.stat().st_size for side in (path, path.with_name(path.name + "-wal")) if side.exists())
    return _with_room(path, f"{found}, {_megabytes(n_bytes)}")


def _with_room(path: Path, found: str) -> Finding:
    folder = next(one for one in path.absolute().parents if one.exists())
    free_bytes = shutil.disk_usage(folder).free
    found = f"{found}, {_megabytes(free_bytes)} free"
    if free_bytes < NO_ROOM_BYTES:
        return problem("store", found, f"make room on the disk of {folder}")
    if free_bytes < LITTLE_ROOM_BYTES:
        return warning("store", found, f"make room on the disk of {folder}: a full one loses measurements")
    return ok("store", found)


def keys(machine: Machine) -> Finding:
    """The keys for tcp:// addresses, if a folder is given."""
    folder = machine.keys_dir
    if folder is None:
        if machine.endpoint.startswith("tcp://"):
            return problem("keys", f"none, and {machine.endpoint} needs them", "name their folder with --curve-keys")
        return ok("keys", "none; only several nodes need them")
    secrets = sorted(folder.glob("*.key_secret")) if folder.is_dir() else []
    if not secrets:
        return problem("keys", f"no keys in {folder}", f"make them with `zerotune daemon keys {folder}`")
    is_client = any(one.name == "client.key_secret" for one in secrets)
    if is_client and not (folder / "server.key").is_file():
        return problem("keys", f"{folder} lacks server.key", "copy it from the daemon's node")
    if readable := [one for one in secrets if stat.S_IMODE(one.stat().st_mode) & OTHERS]:
        others = " ".join(map(str, readable))
        return problem("keys", f"others can read {others}", f"chmod 600 {others}")
    return ok("keys", f"{folder}: {', '.join(one.stem for one in secrets)}")


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB" if n_bytes < 10**10 else f"{n_bytes / 1e9:,.0f} GB"
