"""The status page's process beside a real daemon, over real HTTP: who is let in, what is told, and what it costs."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import zmq
from watched_daemon import HOSTILE, N_RANKS, WAIT_S, Browser, Job, daemon, status_page, wait_for

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
patience = pytest.importorskip("zerotune.tuner.watching.web.patience")


@pytest.fixture(scope="module")
def world(short_folder) -> Iterator[SimpleNamespace]:
    with daemon(short_folder) as (process, endpoint), zmq.Context() as context, status_page(endpoint) as url:
        job = Job(context, endpoint)
        browser = Browser(url)
        wait_for(lambda: browser.snapshot().get("jobs"))
        yield SimpleNamespace(daemon=process, endpoint=endpoint, url=url, job=job, browser=browser, context=context)
        context.destroy(linger=0)


def test_only_the_printed_address_lets_in(world):
    assert len(world.browser.token) >= 32
    assert world.browser.ask("/snapshot.json").status == 200
    for path in ("/events", "/snapshot.json", "/nowhere", f"/snapshot.json?token={world.browser.token}"):
        for said in ("", "Bearer ", "Bearer wrong", "Bearer \xe9", f"Basic {world.browser.token}"):
            assert world.browser.ask(path, Authorization=said, Cookie=world.browser.token).status == 403


def test_the_page_itself_tells_nothing_and_hands_out_no_cookie(world):
    for path in ("/", "/page.js", "/page.css", "/icon.svg"):
        answer = world.browser.ask(path, Authorization="")
        assert answer.status == 200
        assert answer.getheader("set-cookie") is None
        assert world.browser.token not in answer.read().decode()


def test_signals_for_the_training_of_a_batch_job_leave_it_alone(world):
    with status_page(world.endpoint) as url:
        alive = (one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE)
        (process,) = (one for one in alive if one.cmdline()[-1] == "127.0.0.1:0" and
                      Browser(url).port in {each.laddr.port for each in one.net_connections("inet")})  # fmt: skip
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
        assert Browser(url).ask("/snapshot.json").status == 200


def test_pages_of_others_whose_name_points_here_are_refused(world):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil.example:8470"):
        assert world.browser.ask("/", Host=host).status == 421, host
    for host in ("localhost", f"127.0.0.1:{world.browser.port}", "[::1]:80", "LOCALHOST:1"):
        assert world.browser.ask("/", Host=host).status == 200, host


def test_it_can_only_be_read(world):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert world.browser.ask("/", method).status == 405
    for path in ("/", "/events", "/snapshot.json"):
        assert world.browser.ask(path, "HEAD").read() == b""


def test_pages_run_nothing_but_their_own_script(world):
    page = world.browser.ask("/")
    policy = dict(part.strip().partition(" ")[::2] for part in page.getheader("content-security-policy").split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    text = page.read().decode()
    assert " on" + "click" not in text
    assert "<style" not in text
    assert text.count("<script") == text.count("<script src=")
    assert world.browser.ask("/page.js").getheader("x-content-type-options") == "nosniff"


def test_a_page_is_told_everything_once_and_then_what_is_new(world):
    events = world.browser.events()
    name, whole = next(events)
    assert name == "whole"
    (job,) = whole["jobs"]
    assert (job["job_id"], job["n_ranks_seen"], job["n_ranks"]) == ("job", N_RANKS, N_RANKS)
    assert job["fabric_id"] == HOSTILE
    known = job.get("steps", [])
    world.job.step(*range(1, 6))
    while len(known) < 5:
        name, change = next(events)
        assert name == "change"
        (job,) = change["jobs"]
        known += job.get("steps", [])
    assert [one[:3] for one in known] == [[number, 1000.0 + number, 100.0] for number in range(1, 6)]
    assert (job["step"], job["step_us"], job["exposed_us"]) == (5, 1003.0, 100.0)
    events.close()


def test_connections_that_ask_for_nothing_take_no_place(world):
    with contextlib.ExitStack() as stack:
        open_page = world.browser.events()
        assert next(open_page)[0] == "whole"
        idle = []
        for said in (b"", b"GET / HTTP/1.1\r\nX-") * patience.MAX_CONNECTIONS:
            idle.append(stack.enter_context(socket.create_connection((world.browser.host, world.browser.port), WAIT_S)))
            idle[-1].sendall(said)
        assert world.browser.ask("/snapshot.json").status == 200, "at once"
        assert next(open_page)[0] == "change"
        for one in idle:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        open_page.close()


def test_endless_requests_hold_no_place(world):
    """They have no token, and read so little that there is always an answer on its way to them."""
    asked = b"GET /page.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50
    with contextlib.ExitStack() as stack:
        open_page = world.browser.events()
        assert next(open_page)[0] == "whole"
        greedy = [stack.enter_context(socket.socket()) for _ in range(patience.MAX_CONNECTIONS)]
        for one in greedy:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect((world.browser.host, world.browser.port))
            one.setblocking(False)
        for _ in range(20):
            for one in greedy:
                with contextlib.suppress(OSError):
                    while True:
                        one.send(asked)
            time.sleep(0.05)
        for _ in range(5):
            assert world.browser.ask("/snapshot.json").status == 200
        assert next(open_page)[0] == "change"
        open_page.close()


def test_a_client_that_reads_no_answer_is_cut_off(monkeypatch):
    gone = threading.Event()

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while server.server_state.connections:
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        gone.set()

    monkeypatch.setattr(patience, "UNREAD_S", 0.2)
    config = uvicorn.Config(endless, http=patience.Connection, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            with socket.create_connection(listening.getsockname()) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert gone.wait(WAIT_S)
        finally:
            server.should_exit = True
            thread.join()


def test_jobs_leave_and_daemons_end_and_the_page_says_so(world):
    def ranks_of_other() -> list[int]:
        return [one["n_ranks_seen"] for one in world.browser.snapshot()["jobs"] if one["job_id"] == "other"]

    other = Job(world.context, world.endpoint, "other")
    # Were one rank gone before the other came, a job would begin anew with that one and wait for the first.
    wait_for(lambda: ranks_of_other() == [N_RANKS])
    other.leave()
    wait_for(lambda: not ranks_of_other())
    world.daemon.terminate()
    world.daemon.wait()
    assert wait_for(lambda: world.browser.snapshot().get("problem"))
