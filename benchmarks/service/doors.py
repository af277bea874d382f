"""Attacks from outside on all that is open: by strangers of the network, and by files that others wrote.

Run: python -m benchmarks doors [--quick] [--json]

An attack holds if the product refuses, goes on and keeps its data, within `LONGEST_S`. `worst_memory_mib` is over our
processes; `worst_wait_s` is the longest wait of a command or of an honest client. Attacks by users of the same node,
fleet or cache are in tests/all_users, tests/fleet and tests/nccl.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import zmq

from benchmarks.lib.faults import place_attacks
from benchmarks.lib.faults.wire_tap import WireTap
from benchmarks.lib.free_port import free_port
from benchmarks.lib.reporting import Result, options_of, report, say
from zerotune.agent.daemon_link.keys import use_client_keys
from zerotune.store import wire
from zerotune.store.sqlite.database import Store
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.service.endpoint import make_keys

LONGEST_S: Final = 25.0
MOST_MIB: Final = 1536
MOST_GROWN_BYTES: Final = 40 << 20
"""Growth of a daemon while a peer sends Hello."""
MAX_FILES: Final = 320
"""Files that a daemon which strangers meet may open."""
ENDLESS: Final = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT"
SCHEMAS: Final = {
    "trigger": "CREATE TRIGGER t AFTER UPDATE ON jobs BEGIN DELETE FROM measurements; END",
    "view of steps": f"ALTER TABLE steps RENAME TO s; CREATE VIEW steps AS {ENDLESS} n AS step FROM r",
    "view of jobs": "PRAGMA legacy_alter_table = 1; ALTER TABLE jobs RENAME TO j;"
    f" CREATE VIEW jobs AS SELECT * FROM j WHERE ({ENDLESS} count(*) FROM r) > 0",
    "costly index": "CREATE INDEX i ON jobs (length(replace(hex(zeroblob(100000000)), '0', job_id)))",
}
READING: Final = {
    "plan": ("launch", "--plan", "FILE", "--", "true"),
    "fabric": ("launch", "--fabric", "./FILE", "--", "true"),
    "advise": ("advise", "FILE"),
    "book": ("store", "book", "show", "FILE"),
    "book key": ("store", "book", "show", "none.book", "--book-key", "FILE"),
    "store": ("jobs", "--store", "FILE"),
}
Attack = tuple[str, Callable[[Path], bool]]
waits_s: list[float] = []
"""The wait of each command or honest client."""


def command(folder: Path, *words: str, n_files: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `zerotune` for LONGEST_S at most, and with little memory."""
    limits = ["prlimit", f"--as={6 << 30}", *([f"--nofile={n_files}"] if n_files else [])]
    began_s = time.monotonic()
    try:
        return subprocess.run(
            [*limits, sys.executable, "-P", "-m", "zerotune.tuner.cli", *words],
            cwd=folder, capture_output=True, text=True, check=False, timeout=LONGEST_S, env=environment(folder),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", "")
    finally:
        waits_s.append(time.monotonic() - began_s)


def environment(folder: Path) -> dict[str, str]:
    """It keeps a command within a folder."""
    names = ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "ZEROTUNE_RUNTIME_DIR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ZEROTUNE_")}
    return kept | {name: str(folder / name.lower()) for name in names}


def until(is_so: Callable[[], bool]) -> bool:
    """Wait for LONGEST_S at most; returns whether the condition became true."""
    ends_at_s = time.monotonic() + LONGEST_S
    while not (found := is_so()) and time.monotonic() < ends_at_s:
        time.sleep(0.05)
    return found


def is_refused(done: subprocess.CompletedProcess[str]) -> bool:
    """The command printed one sentence instead of a traceback."""
    return done.returncode == 2 and "Traceback" not in done.stderr


def reads(words: Sequence[str], kind: str) -> Callable[[Path], bool]:
    """A command reads something that is no file."""

    def attack(folder: Path) -> bool:
        file = folder / "file.toml"
        os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
        return is_refused(command(folder, *(word.replace("FILE", file.name) for word in words)))

    return attack


def brings(statements: str, *words: str) -> Callable[[Path], bool]:
    """A command reads a store that contains SQL."""

    def attack(folder: Path) -> bool:
        Store.open(path := folder / "store.db").close()
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(statements)
        done = command(folder, *words, str(path))
        return done.returncode in (1, 2) and "Traceback" not in done.stderr

    return attack


def planted_module(folder: Path) -> bool:
    """A foreign module lies where `launch --daemon` is run."""
    for name in ("zmq", "msgspec", "numpy", "zerotune"):
        (folder / f"{name}.py").write_text("open('ran', 'w').close()\n")
    folder.joinpath("run").mkdir(mode=0o700)
    endpoint = f"ipc://{folder}/run/d.sock"
    command(folder, "launch", "--daemon", "--endpoint", endpoint, "--store", "s.db", "--", "true")
    with suppress(Exception):
        if (found := fetch_status(endpoint, 5.0)) is not None:
            os.kill(found.daemon_pid, signal.SIGTERM)
    return not (folder / "ran").exists()


def few_files(folder: Path) -> bool:
    return all(is_refused(command(folder, "launch", "--", "true", n_files=n)) for n in (10, 16, 20))


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """A daemon at two addresses, which may open few files."""
    make_keys(folder / "keys")
    ipc, tcp = f"ipc://{folder}/d.sock", f"tcp://127.0.0.1:{free_port()}"
    words = ["daemon", "--endpoint", ipc, "--listen", tcp, "--curve-keys", str(folder / "keys"), "--store", "s.db"]
    process = subprocess.Popen(
        ["prlimit", f"--nofile={MAX_FILES}", sys.executable, "-P", "-m", "zerotune.tuner.cli", *words],
        cwd=folder, stderr=subprocess.DEVNULL, env=environment(folder),
    )  # fmt: skip
    try:
        until(lambda: fetch_status(ipc, 1.0) is not None)
        yield process, ipc, tcp
    finally:
        process.kill()
        process.wait()


def strangers(begin: bytes) -> Callable[[Path], bool]:
    """Connections without a key are held open."""

    def attack(folder: Path) -> bool:
        with ExitStack() as held, daemon(folder) as (process, ipc, tcp):
            for _ in range(2 * MAX_FILES):
                with suppress(OSError):
                    place = ("127.0.0.1", int(tcp.rpartition(":")[2]))
                    held.enter_context(one := socket.create_connection(place, timeout=1.0)).sendall(begin)
                    del one
            began_s = time.monotonic()
            is_served = all(fetch_status(at, 10.0, curve_dir=folder / "keys") is not None for at in (ipc, tcp))
            waits_s.append(time.monotonic() - began_s)
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(LONGEST_S) == 0 and is_served
        return False

    return attack


def said_again(folder: Path) -> bool:
    """The messages of a peer with keys are recorded and replayed: by a stranger, doubled, and backwards."""
    n_said = 5
    hello = wire.Hello("job", 0, 1, 0, "node", 1, "fabric", {}, 22809, 5)
    observed = wire.Observations("job", 0, n_said)
    said = [wire.encode(hello), wire.encode(observed, bytes(n_said * wire.OBSERVATION_BYTES))]
    n_frames = sum(map(len, said))
    with ExitStack() as stack:
        _, ipc, tcp = stack.enter_context(daemon(folder))
        tap = stack.enter_context(closing(WireTap(int(tcp.rpartition(":")[2]))))
        rank = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.DEALER))
        rank.linger = 0
        use_client_keys(rank, folder / "keys")
        rank.connect(f"tcp://127.0.0.1:{tap.port}")

        def speak() -> None:
            for frames in said:
                rank.send_multipart(frames)

        def n_heard() -> int:
            found = fetch_status(ipc, 5.0)
            return -1 if found is None else sum(job.n_observations for job in found.jobs)

        def is_heard(n_times: int) -> bool:
            """Only the messages of its latest connection are accepted."""
            until(lambda: len(tap.sent) == n_times)
            speak()
            return until(lambda: n_heard() == n_times * n_said)

        holds = is_heard(1)
        tap.say_anew(*tap.sent[0])
        tap.say(*tap.sent[0][-len(said[1]) :])
        holds &= is_heard(2)
        tap.hold()
        speak()
        holds &= until(lambda: tap.n_held == n_frames)
        tap.release(*reversed(range(n_frames)))
        return holds and is_heard(3)


def greets(hellos: Sequence[wire.Hello]) -> Callable[[Path], bool]:
    """A peer with the client's key sends Hello, each time with another job."""

    def attack(folder: Path) -> bool:
        with ExitStack() as stack:
            process, ipc, tcp = stack.enter_context(daemon(folder))
            peer = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.DEALER))
            peer.linger = 0
            use_client_keys(peer, folder / "keys")
            peer.connect(tcp)
            before = fetch_status(ipc, 5.0)
            for hello in hellos:
                peer.send_multipart(wire.encode(hello))  # and so leaves the job before
                if peer.poll(5_000):
                    peer.recv_multipart()
            time.sleep(1.0)
            after = fetch_status(ipc, 5.0)
            if process.poll() is not None or before is None or after is None:
                return False
            return after.resident_bytes - before.resident_bytes < MOST_GROWN_BYTES

    return attack


def greeting(number: int, facts: dict[str, str | int | float | bool]) -> wire.Hello:
    """Of a job of one rank, on a fabric of its own."""
    return wire.Hello(f"job{number}", 0, 1, 0, "node", 1, f"fabric{number}", facts, 22809, 5)


def holds_places(attack: Callable[[Path, dict[str, str]], bool]) -> Callable[[Path], bool]:
    return lambda folder: attack(folder, environment(folder))


def attacks(*, is_quick: bool) -> Iterator[Attack]:
    """Name and attack, those that need no root first."""
    for name, words in list(READING.items())[: 2 if is_quick else None]:
        for kind in ("pipe", "device"):
            yield f"{name} is a {kind}", reads(words, kind)
    for name, statements in list(SCHEMAS.items())[: 2 if is_quick else None]:
        yield f"store with {name}: jobs", brings(statements, "jobs", "--store")
        if not is_quick:
            yield f"store with {name}: check", brings(statements, "store", "check")
            yield f"store with {name}: explain", brings(statements, "explain", "--store")
    yield "module in the current folder", planted_module
    yield "few descriptors", few_files
    yield "strangers who are silent", strangers(b"")
    if not is_quick:
        yield "strangers who begin", strangers(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + bytes(47))
    yield "words said again", said_again
    yield "greeting with a NUL", greets([greeting(0, {"emulated": "x\0.toml"})])
    if not is_quick:
        facts: dict[str, str | int | float | bool] = {f"fact{number}": "x" * 500 for number in range(30)}
        yield "greetings of many fabrics", greets([greeting(number, facts) for number in range(3_000)])
    if find_spec("uvicorn") is not None:
        yield "status page asked without end", holds_places(place_attacks.status_page_asked_without_end)
    yield "metrics asked slowly", holds_places(place_attacks.metrics_asked_slowly)
    yield "terminal of absurd width", holds_places(place_attacks.absurd_width)


def main() -> None:
    parser = options_of(__doc__, quick="fewer of a kind; ends within 60 s")
    arguments = parser.parse_args()
    made = list(attacks(is_quick=arguments.quick))
    if os.getuid() == 0:
        made.append(("leader of a silent name", holds_places(place_attacks.silent_names)))
    else:
        say("the leader of a silent name is left out, as it needs root")
    n_held = 0
    for name, attack in made:
        with tempfile.TemporaryDirectory(prefix="zt-") as folder:
            began_s = time.monotonic()
            try:
                holds = attack(Path(folder))
            except Exception as error:
                holds = False
                say(f"{name}: {type(error).__name__}: {error}")
            n_held += holds
            say(f"{'holds' if holds else 'GETS THROUGH':12s} {time.monotonic() - began_s:6.1f} s  {name}")
    kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    results = [
        Result("attacks", len(made), "", "> 0"),
        Result("attacks_that_hold_share", n_held / len(made), "", "1"),
        Result("worst_memory_mib", kib / 1024, "MiB", f"<= {MOST_MIB}"),
        Result("worst_wait_s", max(waits_s), "s", f"<= {LONGEST_S:g}"),
    ]
    report("doors", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
