"""Users of one node at root's service: each sees and moves their own jobs only, and root all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.fleet.fleet_rows import signer_of
from zerotune.agent.daemon_link import node_service
from zerotune.store.errors import UserError
from zerotune.store.paths import SERVICE_DOOR
from zerotune.tuner.all_users import service as service_module
from zerotune.tuner.all_users.door import Door
from zerotune.tuner.all_users.folders import Share, User
from zerotune.tuner.all_users.service import MAX_LET_IN, MAX_NAMELESS, MAX_VISITS, AllUsers, Policy
from zerotune.tuner.all_users.user_process import CANNOT_RUN, UserProcess, outputs_of
from zerotune.tuner.cli.app import app

WORLD = Path(__file__).with_name("node_world.py")
ALICE, BOB, MALLORY, CAROL = 20_001, 20_002, 20_003, 20_900
LENT = 2**32 - 6
"""Directories of users lend numbers from 2^31 on."""
GROUP = "users"
USERS_GID = 100
RUNTIME, STATE = "/run/zerotune", "/var/lib/zerotune"


def may_have_a_node() -> bool:
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not may_have_a_node(), reason="acts as several users in a mount namespace: needs root")


class Node:
    """Moves users about on a node; each method of `World` is one of this."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "--mount", sys.executable, str(WORLD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps([name, arguments, named]), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

        return call

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(node: Node) -> Iterator[Node]:
    """Alice and Bob have daemons; Alice has a job."""
    node.start("--share", "node")
    for uid in (ALICE, BOB):  # the second is started while the first is still starting
        node.request_daemon(uid, uid, 0.0)
    for uid in (ALICE, BOB):
        node.request_daemon(uid)
    assert node.greet(ALICE, ALICE, "job-of-alice") == "Welcome"
    yield node
    assert node.stop() == 0
    assert node.gone(ALICE)
    assert node.gone(BOB)


def test_each_finds_a_daemon_that_runs_as_they_do(served: Node) -> None:
    for uid in (ALICE, BOB):
        endpoint = f"ipc://{RUNTIME}/{uid}/daemon.sock"
        assert served.request_daemon(uid) == [[endpoint, ""], endpoint, f"{STATE}/{uid}/store.db"]
        assert served.daemon(uid)[1] == uid
    assert served.daemon(ALICE)[0] != served.daemon(BOB)[0]
    assert served.daemon(MALLORY) is None, "who does not ask gets none"


def test_nobody_sees_or_moves_the_jobs_of_others(served: Node) -> None:
    socket = f"{RUNTIME}/{ALICE}/daemon.sock"
    assert served.jobs(ALICE, ALICE) == [["job-of-alice", 1]]
    assert served.jobs(BOB, BOB) == []
    assert served.jobs(BOB, ALICE) == "UntrustedError", "our own clients refuse"
    assert served.connect(BOB, socket) == "PermissionError", "and so does the kernel"
    assert served.greet(BOB, ALICE, "job-of-alice") == "UntrustedError"
    for path in (f"{STATE}/{ALICE}", f"{STATE}/{ALICE}/store.db", f"{RUNTIME}/{ALICE}"):
        assert served.read(BOB, path) == "PermissionError"
    assert served.write(BOB, f"{STATE}/{ALICE}/store.db") == "PermissionError"
    assert served.kill(BOB, served.daemon(ALICE)[0]) == "PermissionError"
    assert served.greet(BOB, BOB, "job-of-alice") == "Welcome", "a job of the same name, but Bob's"
    assert served.jobs(ALICE, ALICE) == [["job-of-alice", 1]]


def test_root_sees_all_and_nobody_else_does(served: Node) -> None:
    code, out, _ = served.command(0, "status", "--all-users", "--json")
    assert code == 0
    replies = json.loads(out)
    assert [reply["uid"] for reply in replies] == [ALICE, BOB]
    jobs = {reply["endpoint"]: [job["job_id"] for job in reply["jobs"]] for reply in replies}
    assert "job-of-alice" in jobs[f"ipc://{RUNTIME}/{ALICE}/daemon.sock"]
    assert set(jobs) == {f"ipc://{RUNTIME}/{uid}/daemon.sock" for uid in (ALICE, BOB)}
    assert served.command(BOB, "status", "--all-users")[0] == 2


def test_a_users_daemon_gets_nothing_that_names_libraries(served: Node) -> None:
    names, folder = served.told_to(served.daemon(ALICE)[0])
    assert "PATH" in names
    assert not [name for name in names if name.startswith(("LD_", "NCCL_", "PYTHON", "ZEROTUNE_"))]
    assert folder == "/"


def test_a_users_daemon_holds_nothing_that_root_has_open(served: Node) -> None:
    assert served.shared_with_service(served.daemon(ALICE)[0]) == []
    assert served.read(ALICE, f"{STATE}/{ALICE}/daemon.log") > 0
    assert served.mode(f"{STATE}/{ALICE}/daemon.log") == [ALICE, ALICE, 0o600]


def test_root_is_told_whose_daemon_does_not_answer(served: Node) -> None:
    served.kill(BOB, pid := served.daemon(BOB)[0], signal.SIGSTOP)
    try:
        code, out, told = served.command(0, "status", "--all-users", "--json")
    finally:
        served.kill(BOB, pid, signal.SIGCONT)
    assert code == 0
    assert [reply["endpoint"] for reply in json.loads(out)] == [f"ipc://{RUNTIME}/{ALICE}/daemon.sock"]
    assert f"{RUNTIME}/{BOB}/daemon.sock" in told
    assert f"{RUNTIME}/{ALICE}/daemon.sock" not in told


TARGETS = [pytest.param(one, marks=pytest.mark.slow) for one in ("a" * 300, f"../{ALICE}/daemon.sock")]


@pytest.mark.parametrize("target", ["daemon.sock", *TARGETS])
def test_a_users_false_daemon_hides_no_other_daemon(served: Node, target: str) -> None:
    pid = served.daemon(BOB)[0]
    served.link(BOB, target)
    code, out, told = served.command(0, "status", "--all-users")
    served.kill(BOB, pid)
    assert code == 0, told
    assert [line for line in out.splitlines() if line.startswith("user ")] == [f"user {ALICE}:"]
    assert "job-of-alice" in out
    assert f"{RUNTIME}/{BOB}/daemon.sock" in told
    served.wait_for_end(pid)
    served.request_daemon(BOB)


@pytest.mark.parametrize("words", [("daemon", "--idle-exit", "1"), ("status",)])
@pytest.mark.parametrize("max_processes", [1, 3, 5])
def test_a_limit_on_threads_is_told(served: Node, words: tuple[str, ...], max_processes: int) -> None:
    """Libraries end or interrupt their process where they can begin none."""
    code, _, told = served.command(CAROL, *words, max_processes=max_processes)
    assert code == 2, told
    assert "ulimit -u" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("home", [pytest.param("", marks=pytest.mark.slow), "/tmp/j\udcfcrgen"])
def test_training_starts_without_a_home_or_in_one_that_is_no_utf8(another_node: Node, home: str) -> None:
    for words in ((), ("--daemon",), ("--no-agent", "--fabric", "ethernet_boxes")):
        code, out, told = another_node.command(CAROL, "launch", *words, "--", "echo", "trained", home=home)
        assert (code, out) == (0, "trained\n"), told
        assert "Traceback" not in told
    for words in (("jobs",), ("daemon",), ("store", "book", "show", "\udcff")):
        code, _, told = another_node.command(CAROL, *words, home=home)
        assert code == 2
        assert told.count("\n") == 1, told


def test_shared_files_are_read_by_all_and_written_by_their_owner(served: Node) -> None:
    pool = f"{STATE}/shared/node"
    assert served.write(ALICE, f"{pool}/{ALICE}/f.msgpack") == 1
    assert served.read(BOB, f"{pool}/{ALICE}/f.msgpack") == 1
    assert served.write(BOB, f"{pool}/{ALICE}/f.msgpack") == "PermissionError"
    assert served.write(BOB, f"{pool}/{BOB + 1}") == "PermissionError"


def test_one_who_kills_their_daemon_gets_another(served: Node) -> None:
    pid = served.daemon(BOB)[0]
    served.kill(BOB, pid)
    assert served.gone(BOB)
    served.request_daemon(BOB)
    assert served.daemon(BOB)[0] not in (pid, None)
    assert served.daemon(ALICE)[1] == ALICE


@pytest.fixture
def another_node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def test_only_members_of_the_group_are_served_and_all_ends_with_the_service(another_node: Node) -> None:
    another_node.start("--socket-group", GROUP, "--share", "group")
    assert another_node.request_daemon(MALLORY)[0] is None
    assert not another_node.request_daemon(MALLORY)[1].startswith(f"ipc://{RUNTIME}"), "their own place, as without it"
    assert another_node.request_daemon(ALICE, USERS_GID)[0] == [f"ipc://{RUNTIME}/{ALICE}/daemon.sock", ""]
    pool = f"{STATE}/shared/group-{USERS_GID}"
    assert another_node.mode(pool) == [0, USERS_GID, 0o750]
    assert another_node.read(MALLORY, pool) == "PermissionError"
    assert another_node.read(BOB, pool, USERS_GID) == [str(ALICE)]
    another_node.stop(signal.SIGKILL)
    assert another_node.gone(ALICE), "no daemon outlives it, however it ended"


def test_after_the_service_a_users_own_place_counts_again(another_node: Node) -> None:
    another_node.start()
    assert another_node.request_daemon(ALICE)[1].startswith(f"ipc://{RUNTIME}")
    assert another_node.stop() == 0
    assert not another_node.request_daemon(ALICE, wait_s=0.0)[1].startswith(f"ipc://{RUNTIME}")


def test_a_service_that_is_not_roots_is_not_asked(another_node: Node) -> None:
    another_node.make(RUNTIME, MALLORY, 0o755)
    another_node.make(f"{RUNTIME}/{ALICE}", MALLORY, 0o700)
    told, endpoint, _ = another_node.request_daemon(ALICE)
    assert told is None
    assert not endpoint.startswith(f"ipc://{RUNTIME}")
    assert another_node.command(0, "daemon", "--all-users")[0] == 2, "root does not use it either"


def test_a_user_who_stops_all_of_their_processes_stops_nobody_else(another_node: Node) -> None:
    """Also what is theirs for a moment only, between root's fork and the program."""
    another_node.start("--share", "private")
    for uid in range(MALLORY, MALLORY + 8):
        another_node.crowd(uid, 1, 0.5)
        began_s = time.monotonic()
        assert another_node.request_daemon(BOB, BOB, 0.0)[0] == [f"ipc://{RUNTIME}/{BOB}/daemon.sock", ""]
        assert time.monotonic() - began_s < 5.0
        time.sleep(0.2)
    assert another_node.stop() == 0


def test_root_does_not_wait_for_a_process_that_is_stopped_before_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    process = UserProcess(User(MALLORY, MALLORY, (), False), ["/bin/true"], {})
    assert not process.has_ended
    process.signal(signal.SIGKILL)
    ends_at_s = time.monotonic() + 10.0
    while not process.has_ended and time.monotonic() < ends_at_s:
        time.sleep(0.01)
    assert process.code == -signal.SIGKILL


def test_a_user_is_told_why_their_daemon_cannot_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for above in tmp_path.parents:
        if above.name.startswith(("pytest-", "popen-")):  # others may pass through
            above.chmod(0o755)
    process = UserProcess(User(MALLORY, MALLORY, (), False), [str(tmp_path / "none")], {}, log=tmp_path / "log")
    while not process.has_ended:
        time.sleep(0.01)
    assert process.code == CANNOT_RUN
    assert str(tmp_path / "none") in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_user_who_knocks_without_end_keeps_nobody_waiting(another_node: Node) -> None:
    another_node.start("--share", "private")
    another_node.request_daemon(BOB)
    for _ in range(2):
        another_node.flood(MALLORY)
    time.sleep(1.0)
    for _ in range(3):  # a busy machine may be late once, but not for long
        ends_at_s = time.monotonic() + 30.0
        while another_node.request_daemon(BOB, BOB, 0.0)[0] != [f"ipc://{RUNTIME}/{BOB}/daemon.sock", ""]:
            assert time.monotonic() < ends_at_s
    assert another_node.stop() == 0, "the flood goes on"


def test_visitors_without_end_leave_the_loop_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, list[str]] = {BOB: [], MALLORY: []}

    class Endless:
        """Nobody is served: what lies at their folders is none."""

        def __init__(self, uid: int) -> None:
            self.uid = self.gid = uid

        def send(self, **words: str) -> None:
            told[self.uid].append(words["problem"])

        def leave(self) -> None:
            n_told = len(told[MALLORY])
            assert n_told < 2 * MAX_VISITS + MAX_LET_IN, "the loop does not come back"
            if n_told == 2 * MAX_VISITS:
                service.stop()

    def visitor(_: Door) -> Any:
        return Endless(BOB if len(told[MALLORY]) == 2 * MAX_VISITS - 1 and not told[BOB] else MALLORY)

    monkeypatch.setattr(Door, "visitor", visitor)
    monkeypatch.setattr(service_module, "VISITS_S", 3600.0)
    runtime = tmp_path / "run"
    service = AllUsers(runtime, tmp_path / "state", Policy(Share.private, None, [], None, ""))
    for uid in told:
        (runtime / str(uid)).touch()
    with sockets.socket(sockets.AF_UNIX) as waiting:
        waiting.connect(str(runtime / SERVICE_DOOR))
        service.run()
    first, *others = told[MALLORY]
    assert first.replace(str(MALLORY), str(BOB)) == told[BOB][0], "Bob is not refused for what Mallory does"
    assert others.count(first) == MAX_VISITS - 1
    assert len(set(others) - {first}) == 1


def test_a_full_door_is_waited_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_service, "SERVICE_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o755)
    with sockets.socket(sockets.AF_UNIX) as listener, sockets.socket(sockets.AF_UNIX) as before:
        listener.bind(str(tmp_path / SERVICE_DOOR))
        listener.listen(0)
        before.connect(str(tmp_path / SERVICE_DOOR))

        def let_in() -> None:
            time.sleep(0.1)
            with listener.accept()[0], listener.accept()[0] as one:
                one.sendall(b'{"endpoint": "ipc:///here"}\n')

        opening = threading.Thread(target=let_in)
        opening.start()
        answer = node_service.request_daemon(0.0)
        if answer is None:  # let the thread end
            with sockets.socket(sockets.AF_UNIX) as after:
                after.connect(str(tmp_path / SERVICE_DOOR))
        opening.join()
    assert answer == node_service.Answer("ipc:///here")


def test_users_without_a_home_have_daemons_that_remember_their_book(another_node: Node) -> None:
    key = signer_of("builder").public_hex
    another_node.start("--share", "private", "--book", "/tmp/none.book", "--book-key", key)
    assert another_node.request_daemon(MALLORY)[0] == [f"ipc://{RUNTIME}/{MALLORY}/daemon.sock", ""]
    assert another_node.state(MALLORY) == f"{STATE}/{MALLORY}", "not in a home, which the service may not see"


def test_a_folder_that_was_left_unfinished_is_finished(another_node: Node) -> None:
    another_node.start("--share", "node")
    for folder in (RUNTIME, STATE, f"{STATE}/shared/node"):
        another_node.make(f"{folder}/{ALICE}" if folder != f"{STATE}/shared/node" else folder, 0, 0o700)
    assert another_node.request_daemon(ALICE)[0] == [f"ipc://{RUNTIME}/{ALICE}/daemon.sock", ""]
    assert another_node.mode(f"{STATE}/{ALICE}") == [ALICE, ALICE, 0o700]


def test_numbers_that_are_no_users_have_few_daemons(another_node: Node) -> None:
    another_node.start("--share", "private")
    another_node.lend(f"mallory:{MALLORY + 100}:65536\n")
    told, _, _ = another_node.request_daemon(MALLORY + 100)
    assert told[1]
    assert another_node.daemon(MALLORY + 100) is None
    answers = [another_node.request_daemon(MALLORY + at, MALLORY + at, 0.0)[0] for at in range(MAX_NAMELESS + 2)]
    assert [one[0] for one in answers[:MAX_NAMELESS]] == [
        f"ipc://{RUNTIME}/{MALLORY + at}/daemon.sock" for at in range(MAX_NAMELESS)
    ]
    assert all(one[1] for one in answers[MAX_NAMELESS:])


def test_a_visitor_that_leaves_is_not_taken_for_the_next(another_node: Node) -> None:
    """A descriptor that is closed has its number given to the next one, about which nothing was said yet."""
    max_files = 128
    another_node.start("--share", "private", max_files=max_files)
    another_node.swap(MALLORY, max_files // 4)
    assert another_node.request_daemon(BOB)[0] == [f"ipc://{RUNTIME}/{BOB}/daemon.sock", ""]
    assert another_node.stop() == 0


def test_users_of_any_number_are_served(another_node: Node) -> None:
    another_node.start("--share", "group")
    endpoint = f"ipc://{RUNTIME}/{LENT}/daemon.sock"
    assert another_node.request_daemon(LENT) == [[endpoint, ""], endpoint, f"{STATE}/{LENT}/store.db"]
    assert another_node.daemon(LENT)[1] == LENT
    assert another_node.jobs(LENT, LENT) == [], "their own, and trusted by them"
    assert another_node.stop() == 0


def test_an_error_with_one_visitor_ends_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what nobody foresaw."""
    monkeypatch.setattr(service_module, "make_for", lambda *_: 1 / 0)
    service = AllUsers(tmp_path / "run", tmp_path / "state", Policy(Share.private, None, [], None, ""))
    serving = threading.Thread(target=service.run)
    serving.start()
    try:
        for _ in range(2):
            with sockets.socket(sockets.AF_UNIX) as visitor:
                visitor.connect(str(tmp_path / "run" / SERVICE_DOOR))
                visitor.settimeout(10.0)
                assert json.loads(visitor.recv(4096))["problem"]
    finally:
        service.stop()
        os.write(service.wake_fd, b"x")
        serving.join()


def test_waiting_visitors_take_bounded_room(another_node: Node) -> None:
    another_node.start("--share", "private", max_files=128)
    for uid in range(MALLORY, MALLORY + 4):
        another_node.crowd(uid, 60, 5.0, 0.01)
    n_files, spent_s = another_node.service_uses()
    assert n_files < 100
    assert spent_s < 0.5
    assert another_node.request_daemon(BOB)[0] == [f"ipc://{RUNTIME}/{BOB}/daemon.sock", ""]
    another_node.let_go()
    n_files, spent_s = another_node.service_uses()
    assert n_files < 30, "who has left is noticed"
    assert spent_s < 0.5


def test_answers_of_users_to_root_are_bounded() -> None:
    alice, bob, mallory = (User(uid, uid, (), False) for uid in (ALICE, BOB, MALLORY))
    commands = {
        alice: ["/bin/echo", "hello"],
        bob: ["/bin/sh", "-c", "kill -STOP $$"],
        mallory: ["/bin/sh", "-c", "while :; do echo much; done"],
    }
    began_s = time.monotonic()
    assert outputs_of(commands, {"PATH": os.defpath}, 1.5, 10_000, 3) == {alice: b"hello\n"}
    assert time.monotonic() - began_s < 10.0


def test_a_user_who_stops_what_asks_them_takes_no_time_of_others() -> None:
    """Also of those whose turn comes after that user's time was over."""
    mallory, *others = (User(MALLORY + at, MALLORY + at, (), False) for at in range(5))
    commands = {mallory: ["/bin/sh", "-c", "kill -STOP $$"]}
    commands |= {one: ["/bin/sh", "-c", "sleep 0.8; echo hello"] for one in others}
    assert outputs_of(commands, {"PATH": os.defpath}, 2.4, 10_000, 2) == dict.fromkeys(others, b"hello\n")


@pytest.mark.parametrize(
    "words",
    [
        ("--all-users", "--socket-group", "no-such-group"),
        ("--all-users", "--listen", "tcp://*:5577", "--curve-keys", "/tmp"),
        ("--all-users", "--listen", "tcp://*:*"),
        ("--all-users", "--metrics", "localhost:9000"),
        ("--share", "node"),
    ],
)
def test_options_that_contradict_each_other(words: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        app(["daemon", *words], standalone_mode=False)
