"""What the dashboard costs the daemon: shares of a core with a page open, with none, and without a dashboard.

A daemon serves 64 ranks (8 jobs of 8), each of which tells of 128 collectives a second. In turns of some seconds each,
nothing looks at it, a dashboard runs that no page is open at, and one page is open. Processor time is that of all the
daemon's threads, as the kernel counts it in nanoseconds; medians over the turns. On a busy machine they differ by more
than a dashboard costs, so two more figures make up what is added: what one request costs the daemon, of bursts of
hundreds, and how many a dashboard makes per second, counted by a stand-in for the daemon: where a busy machine lets it
make fewer, what is added is of as many as it would make.

Run: python -m benchmarks dashboard_cost [--quick] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import zmq

from benchmarks.lib.reporting import Result, report
from benchmarks.service.daemon_load import Load, start, wait_for
from zerotune.store import wire
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.watching.web.feed import PERIOD_S

WAYS = ("alone", "without_page", "with_page")


def cpu_ns(pid: int) -> int:
    """Time that a process's living threads have run."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += int((task / "schedstat").read_text().split()[0])
    return found


@contextlib.contextmanager
def training(endpoint: str) -> Iterator[None]:
    """64 ranks, a message of each per second."""
    stop = threading.Event()

    def train() -> None:
        with zmq.Context() as context:
            load = Load(context, endpoint)
            while not stop.is_set():
                load.round(1.0)
                load.answer(limit=64)
                load.keep_alive()
            context.destroy(linger=0)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def dashboard(endpoint: str) -> Iterator[str]:
    """Its address."""
    words = [sys.executable, "-m", "zerotune.tuner.cli", "dashboard", "--no-token"]
    with subprocess.Popen(
        [*words, "--endpoint", endpoint, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@contextlib.contextmanager
def page(url: str) -> Iterator[list[int]]:
    """One that is open: bytes of each line that it was told."""
    told: list[int] = []
    with urllib.request.urlopen(f"{url}events") as answer:

        def read() -> None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed below
                for line in answer:
                    told.append(len(line))

        threading.Thread(target=read, daemon=True).start()
        yield told


def request_ms(endpoint: str, pid: int, n_requests: int) -> float:
    """Processor time that one request for status costs the daemon, beside what it does meanwhile.

    Args:
        endpoint: the daemon's.
        pid: its process.
        n_requests: made one after the other; then it is left alone for as long.

    Returns:
        Milliseconds.
    """
    start_ns, start_s = cpu_ns(pid), time.monotonic()
    for _ in range(n_requests):
        if fetch_status(endpoint) is None:
            raise SystemExit("the daemon does not answer")
    used_ns, elapsed_s = cpu_ns(pid) - start_ns, time.monotonic() - start_s
    start_ns, start_s = cpu_ns(pid), time.monotonic()
    time.sleep(elapsed_s)
    return (used_ns - (cpu_ns(pid) - start_ns) * elapsed_s / (time.monotonic() - start_s)) / n_requests / 1e6


def requests_per_s(folder: Path, duration_s: float, *, is_open: bool) -> float:
    """How often a dashboard asks.

    Args:
        folder: for the socket.
        duration_s: of counting.
        is_open: whether a page is.

    Returns:
        Requests per second.
    """
    endpoint, n_asked, stop = f"ipc://{folder}/counting.sock", [0], threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(endpoint)

        def answer() -> None:
            while not stop.is_set():
                if socket.poll(50):
                    sender, *_ = socket.recv_multipart()
                    n_asked[0] += 1
                    reply = wire.StatusReply(1, "0", endpoint, str(folder / "none.db"), 1.0, 1, 0)
                    socket.send_multipart([sender, *wire.encode(reply)])

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with dashboard(endpoint) as url, page(url) if is_open else contextlib.nullcontext():
                time.sleep(1.0)
                n_before = n_asked[0]
                time.sleep(duration_s)
                return (n_asked[0] - n_before) / duration_s
        finally:
            stop.set()
            thread.join()


def measured(folder: Path, n_turns: int, turn_s: float) -> tuple[dict[str, list[float]], float]:
    """Percent of a core by turn, for each of WAYS; and milliseconds of one request, the median of bursts.

    Args:
        folder: for socket and store.
        n_turns: of each way.
        turn_s: seconds of each.

    Returns:
        By way, shape (n_turns,); and ms.
    """
    endpoint = f"ipc://{folder}/d.sock"
    daemon = start("--serve", endpoint, str(folder / "store.db"), core=0)
    shares: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        wait_for(endpoint)
        with training(endpoint):
            time.sleep(3.0)
            request = median(request_ms(endpoint, daemon.pid, 200) for _ in range(n_turns))
            for _ in range(n_turns):
                for way in WAYS:
                    with contextlib.ExitStack() as stack:
                        url = "" if way == "alone" else stack.enter_context(dashboard(endpoint))
                        told = stack.enter_context(page(url)) if way == "with_page" else []
                        while way == "with_page" and not told:
                            time.sleep(0.1)
                        time.sleep(1.0)  # it has loaded, and the page has had all of the beginning
                        n_told, start_ns, start_s = len(told), cpu_ns(daemon.pid), time.monotonic()
                        time.sleep(turn_s)
                        used_ns, elapsed_s = cpu_ns(daemon.pid) - start_ns, time.monotonic() - start_s
                        shares[way].append(100 * used_ns / 1e9 / elapsed_s)
                        if way == "with_page" and len(told) - n_told < turn_s / 2:
                            raise SystemExit("the page was not told of what happens")
    finally:
        daemon.kill()
        daemon.wait()
    return shares, request


def _difference(shares: dict[str, list[float]], way: str) -> float:
    """Median of what a turn took beyond the one before it without a dashboard."""
    return median(one - alone for one, alone in zip(shares[way], shares["alone"], strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    n_turns, turn_s = (2, 2.0) if given.quick else (12, 6.0)
    with tempfile.TemporaryDirectory(prefix="zt-") as folder:
        shares, request = measured(Path(folder), n_turns, turn_s)
        idle, watched = (requests_per_s(Path(folder), 3 * turn_s, is_open=is_open) for is_open in (False, True))
    results = [
        *(Result(f"daemon_percent_of_core_{way}", median(shares[way]), "%") for way in WAYS),
        Result("request_cpu_ms_64_ranks", request, "ms"),
        Result("requests_per_s_without_page", idle, "1/s", target="0"),
        Result("requests_per_s_with_page", watched, "1/s", target="0.5 to 1.2"),
        *(Result(f"difference_percent_of_core_{way}", _difference(shares, way), "%") for way in WAYS[1:]),
        Result("added_percent_of_core_with_page", 100 * request / 1e3 * max(watched, 1 / PERIOD_S), "%", target="<= 1"),
    ]
    report("dashboard_cost", results, as_json=given.json)


if __name__ == "__main__":
    main()
