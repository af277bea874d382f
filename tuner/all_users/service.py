"""The service's loop: whoever comes to the door gets a daemon of their own, started if none runs."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket as sockets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from zerotune.store.errors import UserError
from zerotune.tuner.all_users.door import Door, Visitor
from zerotune.tuner.all_users.folders import Share, User, make_for, make_roots
from zerotune.tuner.all_users.user_daemon import UserDaemon

_log = logging.getLogger("zerotune.all_users")

MAX_WAITING: Final = 256
"""Connections of one user that wait at a time; further ones are told the address, and do not wait."""
START_PAUSE_S: Final = 2.0
"""After a daemon did not start, its user is told so for this long before another is tried."""
LONGEST_END_S: Final = 10.0


class Policy(NamedTuple):
    """What the administrator chose."""

    share: Share
    group: int | None
    """Number of the group whose members are served; None: all users are."""
    options: Sequence[str]
    """Arguments of every user's `zerotune daemon`."""
    keys: Path | None
    """Folder with a folder of keys for each user who may speak to other nodes, named by their number."""
    listen: str
    """Second address of those users' daemons; empty: none."""


class _Place:
    """One user's: their daemon, if it runs, and who waits for it."""

    def __init__(self) -> None:
        self.daemon: UserDaemon | None = None
        self.serves = False
        self.waiting: list[Visitor] = []
        self.failed_at_s = float("-inf")
        self.problem: UserError | None = None


class AllUsers:
    """Serves until `stop`.

    Args:
        runtime: folder for sockets.
        state: folder for stores.
        policy: what the administrator chose.

    Raises:
        UserError: the folders or the door cannot be made.
    """

    def __init__(self, runtime: Path, state: Path, policy: Policy) -> None:
        make_roots(runtime, state)
        self._runtime, self._state, self._policy = runtime, state, policy
        self._places: dict[int, _Place] = {}
        self._is_stopping = False
        self._door = Door(runtime, policy.group)
        self._woken, self._waker = sockets.socketpair()
        for one in (self._woken, self._waker):
            one.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ, self._let_in)
        self._selector.register(self._woken, selectors.EVENT_READ, self._look_after)

    @property
    def wake_fd(self) -> int:
        """File descriptor: a byte written to it wakes the loop."""
        return self._waker.fileno()

    def stop(self) -> None:
        """Leave the loop soon."""
        self._is_stopping = True

    def run(self) -> None:
        """Serve, then end every user's daemon."""
        try:
            while not self._is_stopping:
                for key, _ in self._selector.select():
                    key.data()
        finally:
            self._close()

    def _let_in(self) -> None:
        while (visitor := self._door.visitor()) is not None:
            place = self._places.setdefault(visitor.uid, _Place())
            try:
                self._serve(place, visitor)
            except UserError as error:
                self._fail(visitor, place, error)
            except OSError as error:
                self._fail(visitor, place, UserError(f"no daemon can be started: {error}", "tell your administrator"))

    def _serve(self, place: _Place, visitor: Visitor) -> None:
        self._reap(place)
        user = User.of(visitor.uid, visitor.gid)
        if place.daemon is None:
            if place.problem is not None and time.monotonic() - place.failed_at_s < START_PAUSE_S:
                raise place.problem
            folders = make_for(user, self._runtime, self._state, self._policy.share)
            place.daemon = UserDaemon(user, folders, [*self._policy.options, *self._beyond_the_node(user)])
            place.serves = False
            self._selector.register(place.daemon.ready_fd, selectors.EVENT_READ, lambda: self._answer(place))
            _log.info("user %d: daemon %d starts", user.uid, place.daemon.pid)
        visitor.tell(endpoint=place.daemon.folders.endpoint)
        if place.serves or len(place.waiting) >= MAX_WAITING:
            visitor.leave()
        else:
            place.waiting.append(visitor)

    def _answer(self, place: _Place) -> None:
        """A daemon serves, or has ended before it did."""
        daemon = place.daemon
        assert daemon is not None  # it stays until its descriptor was read
        self._selector.unregister(daemon.ready_fd)
        place.serves = daemon.is_ready()
        os.close(daemon.ready_fd)
        waiting, place.waiting = place.waiting, []
        if place.serves:
            place.problem = None
            for visitor in waiting:
                visitor.leave()
            return
        daemon.reap(LONGEST_END_S)
        place.daemon = None
        problem = UserError(f"the daemon of user {daemon.user.uid} did not start", "the service's log says why")
        _log.warning("%s", problem.problem)
        for visitor in waiting:
            self._fail(visitor, place, problem)

    def _fail(self, visitor: Visitor, place: _Place, problem: UserError) -> None:
        if place.problem is not problem:
            _log.warning("%s", problem)
            place.problem, place.failed_at_s = problem, time.monotonic()
        visitor.tell(problem=problem.problem, remedy=problem.remedy)
        visitor.leave()

    def _beyond_the_node(self, user: User) -> list[str]:
        keys = None if self._policy.keys is None else self._policy.keys / str(user.uid)
        if keys is None or not self._policy.listen or not keys.is_dir():
            return []
        return ["--listen", self._policy.listen, "--curve-keys", str(keys)]

    def _look_after(self) -> None:
        """A signal has come, perhaps of a daemon that ended."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for place in self._places.values():
            self._reap(place)

    def _reap(self, place: _Place) -> None:
        if place.serves and place.daemon is not None and place.daemon.has_ended:
            _log.info("user %d: daemon %d has ended", place.daemon.user.uid, place.daemon.pid)
            place.daemon = None
            place.serves = False

    def _close(self) -> None:
        self._door.close()
        daemons = [place.daemon for place in self._places.values() if place.daemon is not None]
        for daemon in daemons:
            daemon.end()
        ends_at_s = time.monotonic() + LONGEST_END_S
        for daemon in daemons:
            daemon.reap(max(0.1, ends_at_s - time.monotonic()))
        for place in self._places.values():
            for visitor in place.waiting:
                visitor.leave()
        self._selector.close()
        self._woken.close()
        self._waker.close()


def serve_all_users(runtime: Path, state: Path, policy: Policy, on_ready: Callable[[], None]) -> None:
    """Run the service until SIGTERM or SIGINT.

    Args:
        runtime: folder for sockets.
        state: folder for stores.
        policy: what the administrator chose.
        on_ready: called once users are served.

    Raises:
        UserError: the folders or the door cannot be made.
    """
    service = AllUsers(runtime, state, policy)
    with _signals(service):
        on_ready()
        service.run()


@contextlib.contextmanager
def _signals(service: AllUsers) -> Iterator[None]:
    def nothing(*_: Any) -> None:
        """The signal's byte wakes the loop, which looks."""

    handlers: dict[int, Any] = {number: lambda *_: service.stop() for number in (signal.SIGTERM, signal.SIGINT)}
    handlers[signal.SIGCHLD] = nothing
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    previous_fd = signal.set_wakeup_fd(service.wake_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
