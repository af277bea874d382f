"""`zerotune daemon --all-users`, and the status of all users' daemons for root."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....store.errors import UserError, printable
from ....store.paths import SERVICE_RUNTIME_DIR, SERVICE_STATE_DIR
from ...all_users.folders import Share, User
from ...all_users.user_process import outputs_of

if TYPE_CHECKING:
    from ....store.wire import StatusReply

IDLE_EXIT_S: Final = 1800.0
"""A user's daemon ends after this time without a rank; large models load for minutes before they train."""
STATUS_TIMEOUT_S: Final = 15.0
"""Time for each user's daemon to answer, including the start of the interpreter that asks it."""
AT_ONCE: Final = 8
"""Most users whose daemons are asked at a time."""
MAX_STATUS_BYTES: Final = 4 * 2**20
"""Longest answer; a daemon with 1,024 jobs sends half as much."""


def refuse_useless(given: Mapping[str, object], without: str | None = None) -> None:
    """Refuse, with a UserError, options without an effect here.

    They need the option `without`, or belong to a daemon of one user if that is None.
    """
    for option, value in given.items():
        if value is None:
            continue
        if without is not None:
            raise UserError(f"{option} is useless without {without}", f"add {without}, or leave it out")
        raise UserError(f"{option} is useless with --all-users: it is for a daemon of one user", "leave it out")


def serve(group: str | None, share: Share, options: Sequence[str], listen: str | None, keys: Path | None) -> None:
    """Serve all users, or the members of a group, until SIGTERM.

    `share` says who may use a user's measurements. `keys` is a folder with a folder of keys for each user who has keys;
    the daemons of these users also serve `listen`.

    Raises:
        UserError: the caller is not root, or there is no such group.
    """
    from ....store.paths import check_endpoint
    from ...all_users.folders import group_id
    from ...all_users.service import Policy, serve_all_users
    from ...service.readiness import report_ready

    if os.getuid() != 0:
        raise UserError("--all-users needs root, to start daemons as other users", "run `zerotune daemon` for your own")
    if (listen is None) != (keys is None):
        raise UserError("--listen and --curve-keys belong together", "give both, or neither")
    if listen is not None:
        check_endpoint(listen)
        if not listen.endswith(":*"):
            raise UserError(f"--listen {listen} would be every user's port", "write tcp://HOST:* for a free one each")
    policy = Policy(share, None if group is None else group_id(group), options, keys, listen or "")
    runtime = Path(SERVICE_RUNTIME_DIR)

    def announce() -> None:
        report_ready()
        whom = "all users" if group is None else f"members of {group}"
        print(
            f"zerotune: service {os.getpid()} at {runtime} for {whom}, knowledge: {share.value};"
            " `zerotune status --all-users` shows their daemons",
            file=sys.stderr,
            flush=True,
        )

    serve_all_users(runtime, Path(SERVICE_STATE_DIR), policy, announce)


def all_status() -> Iterator[tuple[int, StatusReply]]:
    """The status of each user's daemon by uid, in order; each daemon is asked as that user. UserError: no root."""
    if os.getuid() != 0:
        raise UserError("--all-users shows jobs of others, which only root may see", "leave it out to see your own")
    runtime = Path(SERVICE_RUNTIME_DIR)
    names = os.listdir(runtime) if runtime.is_dir() else []
    users = [User.of(uid, uid) for uid in sorted(int(name) for name in names if name.isascii() and name.isdigit())]
    command = [sys.executable, "-I", "-m", "zerotune.tuner.cli", "status", "--json", "--endpoint"]
    sockets = {user: runtime / str(user.uid) / "daemon.sock" for user in users}
    commands = {user: [*command, f"ipc://{path}"] for user, path in sockets.items()}
    outputs = outputs_of(commands, {"PATH": os.defpath}, STATUS_TIMEOUT_S, MAX_STATUS_BYTES, AT_ONCE)
    for user, path in sockets.items():
        if (reply := plausible_reply(outputs.get(user, b""), user.uid, path)) is not None:
            yield user.uid, reply
        elif os.path.lexists(path):  # lexists follows no link that the user may have made
            print(f"zerotune: nobody answers as a daemon should at {path}", file=sys.stderr)


def plausible_reply(output: bytes, uid: int, path: Path) -> StatusReply | None:
    """A user's daemon's answer, which may be anything; None: that user's daemon could not have sent it."""
    import msgspec

    from ....store.wire import StatusReply

    try:
        reply = msgspec.convert(_in_lines(msgspec.json.decode(output)), StatusReply)
        with contextlib.suppress(FileNotFoundError):  # the daemon has ended since
            if os.stat(f"/proc/{reply.daemon_pid}").st_uid != uid:
                return None  # root might end another user's process because of it
    except Exception:  # no answer of one user may hide the daemons of others
        return None
    return reply if reply.endpoint == f"ipc://{path}" else None


def _in_lines(reply: object) -> object:
    """The answer with texts that begin no line and do not move the cursor."""
    if isinstance(reply, str):
        return printable(reply)
    if isinstance(reply, dict):
        return {name: _in_lines(value) for name, value in reply.items()}
    return [_in_lines(one) for one in reply] if isinstance(reply, list) else reply
