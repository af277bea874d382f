"""A node with users, in a mount namespace of its own; run by root under `unshare --mount`.

What is said on stdin, one expression of JSON a line, is done; the answer is one line of JSON. So a test moves several
users about without starting an interpreter for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
KEEP = Path("/mnt")
RUNTIME, STATE = Path("/run/zerotune"), Path("/var/lib/zerotune")
START_TIMEOUT_S = 60.0
PLANTED = dict.fromkeys(("LD_LIBRARY_PATH", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "PYTHONPATH"), "/planted")
"""In the service's environment: nobody's daemon may load what lies there."""
SERVICE = "import zerotune.tuner.all_users.service as of, zerotune.tuner.cli as it; of.LONGEST_END_S = 3.0; it.main()"
"""It waits for the ends of daemons that their users have stopped: three seconds show what ten do."""


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def make_readable(paths: list[Path]) -> None:
    """Bind `paths` into fresh folders where other users could not reach them: a home of root's, say."""
    closed = {next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None) for path in paths}
    for index, path in enumerate(paths):
        (KEEP / str(index)).mkdir()
        mount("--bind", str(path), str(KEEP / str(index)))
    for folder in filter(None, closed):
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder))
        for index, path in enumerate(paths):
            if path.is_relative_to(folder):
                path.mkdir(parents=True)
                mount("--bind", str(KEEP / str(index)), str(path))


def as_user(uid: int, gid: int, call: Callable[[], Any]) -> Any:
    """The result of `call`, or the name of the error that it raised, in a forked child that is that user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        try:
            result = call()
        except Exception as error:
            result = type(error).__name__
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        text = said.read()
    os.waitpid(child, 0)
    return json.loads(text)


class World:
    """What can be done on the node."""

    def __init__(self) -> None:
        self.service: subprocess.Popen[str] | None = None
        self.clients: list[Any] = []
        self.holders: list[int] = []

    def start(self, *options: str, max_files: int = 0) -> str:
        """Start the service with the rights that systemd would give it; its first line."""
        unit = (ROOT / "deploy/systemd/zerotune.service").read_text()
        (capabilities,) = re.findall("^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
        bounds = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in capabilities.split())])
        command = ["setpriv", "--no-new-privs", "--bounding-set", bounds]
        if max_files:
            command = ["prlimit", f"--nofile={max_files}", *command]
        command += [sys.executable, "-I", "-c", SERVICE, "daemon", "--all-users", *options]
        self.service = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | PLANTED,
            pass_fds=os.pipe(),  # as of a careless script of root's
        )  # fmt: skip
        assert self.service.stderr is not None
        return self.service.stderr.readline()

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.service is not None
        self.service.send_signal(number)
        self.service.communicate(timeout=START_TIMEOUT_S)
        return self.service.returncode

    def request_daemon(self, uid: int, gid: int = 0, wait_s: float = START_TIMEOUT_S) -> Any:
        """What the service says to a user, and where that user looks for a daemon from then on."""
        from zerotune.agent.daemon_link.node_service import request_daemon
        from zerotune.store.paths import default_endpoint, default_store_path

        def ask() -> Any:
            answer = request_daemon(wait_s)
            told = None if answer is None else [answer.endpoint, answer.problem]
            return [told, default_endpoint(), str(default_store_path())]

        return as_user(uid, gid or uid, ask)

    def state(self, uid: int) -> Any:
        """Where a user's programs keep what they must not forget."""
        from zerotune.store.paths import state_dir

        return as_user(uid, uid, lambda: str(state_dir()))

    def jobs(self, uid: int, of: int) -> Any:
        """What a user sees of the jobs at the daemon of another, or their own."""
        from zerotune.tuner.client.status import fetch_status

        def ask() -> Any:
            reply = fetch_status(f"ipc://{RUNTIME}/{of}/daemon.sock", 10.0)
            return None if reply is None else [[job.job_id, job.n_ranks_seen] for job in reply.jobs]

        return as_user(uid, uid, ask)

    def greet(self, uid: int, of: int, job: str) -> Any:
        """Say hello as a rank of a job; the kind of the answer."""
        from contextlib import closing

        import zmq

        from zerotune.agent.daemon_link.connection import Connection
        from zerotune.store import wire

        def say() -> Any:
            hello = wire.Hello(job, 0, 1, 0, "node", os.getpid(), "fabric", {}, 22809, 5)
            way = closing(Connection(f"ipc://{RUNTIME}/{of}/daemon.sock"))
            with way as line, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                if not line.connect(dealer):
                    return None
                dealer.send_multipart(wire.encode(hello))
                return type(wire.decode_daemon(dealer.recv_multipart())).__name__ if dealer.poll(10_000) else None

        return as_user(uid, uid, say)

    def connect(self, uid: int, path: str) -> Any:
        def call() -> Any:
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(path)

        return as_user(uid, uid, call)

    def read(self, uid: int, path: str, gid: int = 0) -> Any:
        def call() -> Any:
            return os.listdir(path) if os.path.isdir(path) else len(Path(path).read_bytes())

        return as_user(uid, gid or uid, call)

    def write(self, uid: int, path: str) -> Any:
        return as_user(uid, uid, lambda: Path(path).write_bytes(b"x"))

    def kill(self, uid: int, pid: int, number: int = signal.SIGKILL) -> Any:
        return as_user(uid, uid, lambda: os.kill(pid, number))

    def daemon(self, uid: int) -> Any:
        """Pid and user of the process that listens for a user; None: nobody does."""
        from zerotune.agent.daemon_link.connection import listener_pid

        pid = as_user(uid, uid, lambda: listener_pid(f"ipc://{RUNTIME}/{uid}/daemon.sock"))
        if pid is None:
            return None
        try:
            return [pid, os.stat(f"/proc/{pid}").st_uid]
        except FileNotFoundError:  # it ended meanwhile
            return None

    def told_to(self, pid: int) -> Any:
        """Names in the environment of a process, and its folder."""
        names = [one.partition("=")[0] for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if one]
        return [names, os.readlink(f"/proc/{pid}/cwd")]

    def gone(self, uid: int) -> bool:
        """Wait for the end of a user's daemon."""
        ends_at_s = time.monotonic() + START_TIMEOUT_S
        while self.daemon(uid) is not None:
            if time.monotonic() > ends_at_s:
                return False
            time.sleep(0.02)
        return True

    def wait_for_end(self, pid: int) -> None:
        while psutil.pid_exists(pid):
            time.sleep(0.02)

    def command(self, uid: int, *words: str, max_processes: int = 0, home: str = "/tmp/nobody") -> Any:
        """Exit code and output of `zerotune WORDS` as a user, who may have so many processes and threads.

        An empty `home` is none.
        """
        limited = ["prlimit", f"--nproc={max_processes}"] if max_processes else []
        done = subprocess.run(
            [*limited, sys.executable, "-I", "-m", "zerotune.tuner.cli", *words],
            user=uid, group=uid, extra_groups=[], cwd="/", capture_output=True, text=True, check=False,
            env={"PATH": os.defpath, **({"HOME": f"{home}-{uid}"} if home else {})},
        )  # fmt: skip
        return [done.returncode, done.stdout, done.stderr]

    def crowd(self, uid: int, n: int, stops_for_s: float, pause_s: float = 0.0) -> None:
        """A user makes so many connections to the door, keeps them until `let_go`, and stops all processes of theirs.

        Returns once the connections are made.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            held = [socket.socket(socket.AF_UNIX) for _ in range(n)]
            for one in held:
                one.connect(f"{RUNTIME}/door.sock")
            os.write(writing, b"x")
            ends_at_s = time.monotonic() + stops_for_s
            while time.monotonic() < ends_at_s:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(-1, signal.SIGSTOP)
                time.sleep(pause_s)
            signal.pause()
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        self.holders.append(child)

    def link(self, uid: int, target: str) -> None:
        """A user puts a link where their daemon's socket was."""

        def call() -> None:
            os.unlink(f"{RUNTIME}/{uid}/daemon.sock")
            os.symlink(target, f"{RUNTIME}/{uid}/daemon.sock")

        as_user(uid, uid, call)

    def swap(self, uid: int, n: int) -> None:
        """A user's daemon stands still, and `n` of them wait; in one moment two more come, and the first one leaves."""
        assert self.service is not None

        def come() -> socket.socket:
            os.seteuid(uid)  # the kernel tells the effective user
            try:
                one = socket.socket(socket.AF_UNIX)
                one.connect(f"{RUNTIME}/door.sock")
            finally:
                os.seteuid(0)
            return one

        first = come()
        service = psutil.Process(self.service.pid)
        while not (daemons := [one for one in service.children() if one.uids().real == uid]):
            time.sleep(0.001)
        daemons[0].suspend()
        waiting = [first, *(come() for _ in range(n - 1))]
        for one in waiting:
            one.recv(4096)
        time.sleep(0.2)  # until it waits for what comes next
        service.suspend()
        while service.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        waiting += [come(), come()]
        first.close()
        service.resume()
        waiting[-1].recv(4096)
        for one in waiting:
            one.close()
        daemons[0].kill()

    def flood(self, uid: int) -> None:
        """A user connects to the door and leaves at once, until `let_go`."""
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            while True:
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as one:
                    one.connect(f"{RUNTIME}/door.sock")
        self.holders.append(child)

    def shared_with_service(self, pid: int) -> Any:
        """Pipes and files that a process has open and the service has, too."""
        assert self.service is not None

        def opened(of: int) -> set[str]:
            folder = f"/proc/{of}/fd"
            return {os.readlink(f"{folder}/{one}") for one in os.listdir(folder)}

        both = opened(pid) & opened(self.service.pid)
        return sorted(one for one in both if one.startswith(("pipe:", "/")) and one != os.devnull)

    def let_go(self) -> None:
        for child in self.holders:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.holders = []

    def service_uses(self) -> Any:
        """Descriptors of the service, and processor time (s) that it took within a second."""
        assert self.service is not None

        def spent_s() -> float:
            fields = Path(f"/proc/{self.service.pid}/stat").read_text().rpartition(")")[2].split()
            return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

        before_s = spent_s()
        time.sleep(1.0)
        return [len(os.listdir(f"/proc/{self.service.pid}/fd")), spent_s() - before_s]

    def lend(self, text: str) -> None:
        """Give the node a list of lent numbers."""
        (KEEP / "subuid").write_text(text)
        Path("/etc/subuid").touch()
        mount("--bind", str(KEEP / "subuid"), "/etc/subuid")

    def make(self, path: str, uid: int, mode: int) -> None:
        Path(path).mkdir()
        os.chown(path, uid, uid)
        os.chmod(path, mode)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)

    def mode(self, path: str) -> Any:
        found = os.lstat(path)
        return [found.st_uid, found.st_gid, found.st_mode & 0o7777]


def requests() -> Iterator[list[Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    for name in [name for name in os.environ if name.startswith(("ZEROTUNE_", "XDG_"))]:
        del os.environ[name]
    mount("-t", "tmpfs", "tmpfs", str(KEEP))
    make_readable([Path(sys.base_prefix), Path(sys.prefix), ROOT])
    for folder in (RUNTIME.parent, STATE.parent):
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder))
    import zerotune.tuner.client.status  # noqa: F401 before users come, so that each fork has it

    world = World()
    try:
        for name, arguments, named in requests():
            result = getattr(world, name)(*arguments, **named)
            print(json.dumps(result), flush=True)
    finally:
        world.let_go()
        if world.service is not None:
            world.service.terminate()


if __name__ == "__main__":
    main()
