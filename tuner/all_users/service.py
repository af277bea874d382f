"""The service's loop: each user who connects gets a daemon of their own, which is started if none runs."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import signal
import socket as sockets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...store.errors import UserError
from .door import Door, Visitor
from .folders import Share, User, make_for, make_roots, refuse_lent
from .user_daemon import UserDaemon

_log = logging.getLogger("zerotune.all_users")

MAX_USERS: Final = 256
"""Most users with a daemon at a time; each daemon takes about 90 MB."""
MAX_NAMELESS: Final = 16
"""Most of them that are not in the node's list of users."""
MAX_WAITING: Final = 256
"""Most connections that wait. For one more, the user with most of them loses one, which gets the address."""
START_S: Final = 60.0
"""A daemon that does not serve after this time is killed: its user may have stopped it."""
START_PAUSE_S: Final = 2.0
"""After a failed start, its user's requests are refused for this long before another start."""
MAX_VISITS: Final = 256
"""Most connections of one user within VISITS_S; further ones are refused. All ranks of a node may come at once."""
VISITS_S: Final = 1.0
MAX_LET_IN: Final = 64
"""Most connections accepted in a row, before the loop handles other events."""
NO_ROOM_S: Final = 1.0
"""If no further connection can be accepted, no more are tried for this long."""
LONGEST_END_S: Final = 10.0
_KILLED_S: Final = 1.0
"""At the service's end: how long to wait for killed daemons."""
_LOOK_S: Final = 0.02


class Policy(NamedTuple):
    """The administrator's choices."""

    share: Share
    group: int | None
    """Gid of the group whose members are served; None: all users are."""
    options: Sequence[str]
    """Arguments of every user's `zerotune daemon`."""
    keys: Path | None
    """Folder with a folder of keys, named by uid, for each user who may connect to other nodes."""
    listen: str
    """Second address of those users' daemons; empty: none."""


class _Place:
    """One user's daemon, if it has a process, and its waiting visitors."""

    def __init__(self) -> None:
        self.daemon: UserDaemon | None = None
        self.serves = False
        self.starts_until_s = float("inf")
        """The time by which it must serve; infinite if it serves already, or was killed."""
        self.waiting: list[Visitor] = []
        self.failed_at_s = float("-inf")
        self.problem: UserError | None = None
        self._n_visits, self._visits_since_s = 0, float("-inf")

    def comes_too_often(self) -> bool:
        """Count a visit; return whether it is one too many."""
        if not self._has_come():
            self._n_visits, self._visits_since_s = 0, time.monotonic()
        self._n_visits += 1
        return self._n_visits > MAX_VISITS

    def _has_come(self) -> bool:
        return time.monotonic() - self._visits_since_s < VISITS_S

    @property
    def is_empty(self) -> bool:
        """Whether nothing about this user needs to be kept."""
        has_failed = time.monotonic() - self.failed_at_s < START_PAUSE_S
        return self.daemon is None and not self.waiting and not has_failed and not self._has_come()


class AllUsers:
    """Serves until `stop`. The loop waits only for its selector, since users may stop any process of theirs.

    `runtime` is the folder for sockets, `state` the one for stores.

    Raises:
        UserError: the folders or the socket for requests cannot be made.
    """

    def __init__(self, runtime: Path, state: Path, policy: Policy) -> None:
        make_roots(runtime, state)
        self._runtime, self._state, self._policy = runtime, state, policy
        self._places: dict[int, _Place] = {}
        self._is_stopping = False
        self._shut_until_s = 0.0
        self.n_killed = 0
        """Daemons that did not serve in time."""
        self.n_failures = 0
        """Failures of the service itself, each of which affected one user."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_waiting, self._max_users = min(MAX_WAITING, most // 4), min(MAX_USERS, most // 4)
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
                for key, _ in self._selector.select(self._due_in_s()):
                    # An earlier call may have closed it, and its descriptor may belong to another connection by now.
                    if self._selector.get_map().get(key.fd) is key:
                        self._survive(key.data)
                self._survive(self._kill_the_late)
                self._reopen()
        finally:
            self._close()

    def _survive(self, call: Callable[[], None]) -> None:
        """Make a call; an unexpected failure affects one user and ends no daemon."""
        try:
            call()
        except Exception:
            self.n_failures += 1
            if self.n_failures & (self.n_failures - 1) == 0:  # log only at powers of two, so that no user fills the log
                _log.exception("failure %d of the service's own", self.n_failures)

    def _due_in_s(self) -> float | None:
        """Seconds until something must be done even if nobody connects."""
        due_s = min((place.starts_until_s for place in self._places.values()), default=float("inf"))
        due_s = min(due_s, self._shut_until_s or float("inf"))
        return None if due_s == float("inf") else max(0.0, due_s - time.monotonic())

    def _let_in(self) -> None:
        for _ in range(MAX_LET_IN):
            try:
                visitor = self._door.visitor()
            except OSError as error:
                _log.warning("nobody is let in for %g s: %s", NO_ROOM_S, error)
                self._selector.unregister(self._door)
                self._shut_until_s = time.monotonic() + NO_ROOM_S
                return
            if visitor is None:
                return
            place = self._places.setdefault(visitor.uid, _Place())
            if place.comes_too_often():
                visitor.send(
                    problem=f"user {visitor.uid} asks more than {MAX_VISITS} times within {VISITS_S:g} s",
                    remedy="ask less often",
                )
                visitor.leave()
                continue
            try:
                self._serve(place, visitor)
            except UserError as error:
                self._fail(visitor, place, error)
            except Exception as error:  # a failure with this visitor must not stop the next one
                self._fail(visitor, place, UserError(f"no daemon can be started: {error}", "tell your administrator"))

    def _reopen(self) -> None:
        if self._shut_until_s and time.monotonic() >= self._shut_until_s:
            self._shut_until_s = 0.0
            self._selector.register(self._door, selectors.EVENT_READ, self._let_in)

    def _serve(self, place: _Place, visitor: Visitor) -> None:
        self._reap(place)
        if place.problem is not None and time.monotonic() - place.failed_at_s < START_PAUSE_S and not place.serves:
            raise place.problem
        if place.daemon is None:
            user = User.of(visitor.uid, visitor.gid)
            self._refuse_too_many(user)
            folders = make_for(user, self._runtime, self._state, self._policy.share)
            place.daemon = UserDaemon(user, folders, [*self._policy.options, *self._beyond_the_node(user)])
            place.starts_until_s = time.monotonic() + START_S
            self._selector.register(place.daemon.ready_fd, selectors.EVENT_READ, lambda: self._answer(place))
            _log.info("user %d: daemon %d starts", user.uid, place.daemon.pid)
        elif not place.serves and place.starts_until_s == float("inf"):
            raise UserError(f"the daemon of user {visitor.uid} was killed, and has not ended", "ask again later")
        visitor.send(endpoint=place.daemon.folders.endpoint)
        if place.serves:
            visitor.leave()
            return
        place.waiting.append(visitor)
        self._selector.register(visitor, selectors.EVENT_READ, lambda: self._let_go(place, visitor))
        if sum(len(one.waiting) for one in self._places.values()) > self._max_waiting:
            crowd = max(self._places.values(), key=lambda one: len(one.waiting))
            self._let_go(crowd, crowd.waiting[0])

    def _refuse_too_many(self, user: User) -> None:
        daemons = [place.daemon for place in self._places.values() if place.daemon is not None]
        if not user.has_name:
            refuse_lent(user.uid)
            if sum(not daemon.user.has_name for daemon in daemons) >= MAX_NAMELESS:
                raise UserError(f"{MAX_NAMELESS} users without a name have daemons", "ask as a user of this node")
        if len(daemons) >= self._max_users:
            raise UserError(f"{len(daemons)} users have daemons", "ask again when others have ended theirs")

    def _answer(self, place: _Place) -> None:
        """Answer the visitors once a daemon serves, or has ended before."""
        daemon = place.daemon
        assert daemon is not None  # a daemon stays until its descriptor was read
        self._selector.unregister(daemon.ready_fd)
        if not daemon.is_ready():
            self._give_up(place, f"the daemon of user {daemon.user.uid} did not start")
            return
        place.serves, place.problem, place.starts_until_s = True, None, float("inf")
        for visitor in list(place.waiting):
            self._let_go(place, visitor)

    def _kill_the_late(self) -> None:
        for place in self._places.values():
            if place.daemon is not None and time.monotonic() >= place.starts_until_s:
                self._selector.unregister(place.daemon.ready_fd)
                os.close(place.daemon.ready_fd)
                self.n_killed += 1
                _log.warning("%d daemons were killed, as they did not start in time", self.n_killed)
                self._give_up(place, f"the daemon of user {place.daemon.user.uid} did not start within {START_S:g} s")

    def _give_up(self, place: _Place, problem: str) -> None:
        """Kill a daemon that does not serve; its end is handled later."""
        assert place.daemon is not None
        place.starts_until_s = float("inf")
        place.daemon.signal(signal.SIGKILL)
        error = UserError(problem, f"{place.daemon.folders.log} says why")
        self._failed(place, error)
        for visitor in list(place.waiting):
            visitor.send(problem=error.problem, remedy=error.remedy)
            self._let_go(place, visitor)
        self._reap(place)

    def _fail(self, visitor: Visitor, place: _Place, problem: UserError) -> None:
        self._failed(place, problem)
        visitor.send(problem=problem.problem, remedy=problem.remedy)
        self._let_go(place, visitor)

    def _failed(self, place: _Place, problem: UserError) -> None:
        if place.problem is not problem:
            _log.warning("%s", problem)
            place.problem, place.failed_at_s = problem, time.monotonic()

    def _let_go(self, place: _Place, visitor: Visitor) -> None:
        """End a visitor's connection, whether they still wait or not."""
        if visitor in place.waiting:
            place.waiting.remove(visitor)
            self._selector.unregister(visitor)
        visitor.leave()

    def _beyond_the_node(self, user: User) -> list[str]:
        keys = None if self._policy.keys is None else self._policy.keys / str(user.uid)
        if keys is None or not self._policy.listen or not keys.is_dir():
            return []
        return ["--listen", self._policy.listen, "--curve-keys", str(keys)]

    def _look_after(self) -> None:
        """Handle a signal, perhaps of a daemon that ended."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        for place in self._places.values():
            self._reap(place)
        self._places = {uid: place for uid, place in self._places.items() if not place.is_empty}

    def _reap(self, place: _Place) -> None:
        # The descriptor of a starting daemon shows its end.
        if place.daemon is not None and place.starts_until_s == float("inf") and place.daemon.has_ended:
            _log.info("user %d: daemon %d has ended", place.daemon.user.uid, place.daemon.pid)
            place.daemon = None
            place.serves = False

    def _close(self) -> None:
        self._door.close()
        daemons = [place.daemon for place in self._places.values() if place.daemon is not None]
        for number, within_s in ((signal.SIGTERM, LONGEST_END_S), (signal.SIGKILL, _KILLED_S)):
            for daemon in daemons:
                daemon.signal(number)
            ends_at_s = time.monotonic() + within_s
            while daemons and time.monotonic() < ends_at_s:
                daemons = [daemon for daemon in daemons if not daemon.has_ended]
                time.sleep(_LOOK_S)
        for uid, place in self._places.items():
            for visitor in place.waiting:
                visitor.leave()
            with contextlib.suppress(OSError):  # without a service, commands use the user's own folder
                (self._runtime / str(uid)).rmdir()
        self._selector.close()
        self._woken.close()
        self._waker.close()


def serve_all_users(runtime: Path, state: Path, policy: Policy, on_ready: Callable[[], None]) -> None:
    """Run the service until SIGTERM or SIGINT; raises as `AllUsers`."""
    service = AllUsers(runtime, state, policy)
    with _signals(service):
        on_ready()
        service.run()


@contextlib.contextmanager
def _signals(service: AllUsers) -> Iterator[None]:
    def nothing(*_: Any) -> None:
        """Do nothing: the signal's byte wakes the loop, which does the work."""

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
