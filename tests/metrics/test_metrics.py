"""Metrics of a store and a daemon, the dashboard that goes with them, and scrapers that misbehave."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from zerotune.store.errors import UserError
from zerotune.store.records import Collective, Phase, Stage
from zerotune.store.records.lateness import Lateness, LateRank, SlowCommunicator
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.store.wire import JobStatus, StatusReply
from zerotune.tuner.metrics import Collector, collector, dashboard, server
from zerotune.tuner.metrics.child import metrics_process

LATE = Lateness(9, 4e3, 6e3, (LateRank(5, 1800.0, 0.9, 0, 9, "c"),), (SlowCommunicator((3, 7), 500.0, 0.9, 0, 9),))
JOB = JobStatus("job", "fabric", Stage.zero3, 4, 4, 7, 120, 9000, 1, 16, 800.0, 72_000.0, 0.4, lateness=LATE)
STATUS = StatusReply(1, "0.1", "ipc://x", "s.db", 12.0, 5 << 20, 0, (JOB,), 2)


@pytest.fixture(autouse=True)
def status(monkeypatch):
    asked = []

    def fetch(*_arguments, **_options):
        asked.append(1)
        return STATUS

    monkeypatch.setattr(collector, "fetch_status", fetch)
    return asked


def rows(n_rows: int, duration_us: float = 100.0, phase: Phase = Phase.forward_gather) -> np.ndarray:
    block = np.zeros(n_rows, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"] = 4, 1, 1 << 20
    block["collective"], block["phase"], block["algorithm"], block["protocol"] = Collective.all_gather, phase, 1, 2
    block["duration_us"], block["n_channels"] = duration_us, 8
    return block


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "s.db") as opened:
        opened.record_job("job", "fabric", {"gpu": "x"}, 4)
        opened.record_measurements("fabric", "job", rows(5))
        opened.flush()
        yield opened


def text_of(collected: Collector) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collected)
    return generate_latest(registry).decode()


LABELS = 'algorithm="ring",collective="all_gather",phase="forward_gather",protocol="simple",zerotune_job="job"'


def value(text: str, name: str, labels: str = LABELS) -> float:
    return float(re.search(rf"^{name}{{{re.escape(labels)}}} (\S+)$", text, re.MULTILINE)[1])


def test_measurements_are_counted_once_and_split(store):
    collected = Collector("ipc://x", store.path, from_start=True)
    assert value(text_of(collected), "zerotune_collective_duration_seconds_count") == 5
    store.record_measurements("fabric", "job", rows(3, 400.0))
    store.record_measurements("fabric", "job", rows(2, 1.0, Phase.gradient_scatter))
    store.flush()
    text = text_of(collected)
    assert value(text, "zerotune_collective_duration_seconds_count") == 8
    assert value(text, "zerotune_collective_duration_seconds_sum") == pytest.approx(1700e-6)
    assert value(text, "zerotune_collective_bytes_total") == 8 << 20
    bucket = LABELS.replace("phase=", 'le="0.00016",phase=')
    assert value(text, "zerotune_collective_duration_seconds_bucket", bucket) == 5
    assert 'phase="gradient_scatter"' in text
    assert value(text, "zerotune_job_step_seconds", 'zerotune_job="job"') == 0.072
    assert value(text, "zerotune_job_collective_wait_seconds", 'zerotune_job="job"') == 0.004
    assert value(text, "zerotune_job_rank_late_seconds", 'node="c",rank="5",zerotune_job="job"') == 0.0018
    assert value(text, "zerotune_job_communicator_slow_seconds", 'ranks="3 7",zerotune_job="job"') == 0.0005
    assert "zerotune_up 1.0" in text


def test_metrics_without_daemon_and_store_say_down(tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "fetch_status", lambda *_, **__: None)
    text = text_of(Collector("ipc://x", tmp_path / "none.db"))
    assert "zerotune_up 0.0" in text


def test_the_daemon_is_asked_at_most_once_a_second(store, status):
    now = [0.0]
    collected = Collector("ipc://x", store.path, clock=lambda: now[0])
    for now_s in (0.0, 0.3, 0.9, 1.1):
        now[0] = now_s
        text_of(collected)
    assert len(status) == 2


def test_label_sets_are_bounded(store, monkeypatch):
    monkeypatch.setattr(collector, "MAX_LABEL_SETS", 1)
    store.record_measurements("fabric", "another", rows(4))
    store.flush()
    text = text_of(Collector("ipc://x", store.path, from_start=True))
    assert '"another"' not in text
    assert value(text, "zerotune_collective_duration_seconds_count", LABELS.replace('"job"', '"other"')) == 4


def exposed_labels(store) -> dict[str, set[str]]:
    """By name of a metric."""
    exposed: dict[str, set[str]] = {}
    for name, labels in re.findall(
        r"^(zerotune_\w+)(?:\{(.*)\})? ", text_of(Collector("x", store.path, from_start=True)), re.MULTILINE
    ):
        exposed.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return exposed


def test_the_shipped_dashboard_is_the_newest():
    shipped = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboard.json"
    assert json.loads(shipped.read_text()) == dashboard(), f"zerotune daemon metrics --dashboard {shipped}"


def test_the_dashboard_asks_for_what_there_is(store):
    exposed = exposed_labels(store)
    document = dashboard()
    expressions = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    assert len(expressions) >= 10
    for panel in document["panels"]:
        for target in panel["targets"]:
            names = [name for name in re.findall(r"zerotune_\w+", target["expr"]) if name != collector.JOB_LABEL]
            assert names
            assert set(names) <= exposed.keys(), target["expr"]
            labels = set.union(*(exposed[name] for name in names))
            asked = re.findall(r"by \(([^)]*)\)", target["expr"]) + re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            asked += re.findall(r"\{(\w+)=~", target["expr"])
            wanted = {label.strip() for part in asked for label in part.split(",")}
            assert wanted <= labels, target["expr"]
    assert any({"phase", "algorithm", "protocol"} <= set(re.findall(r"\w+", one)) for one in expressions)
    variable = document["templating"]["list"][0]["query"]["query"]
    assert re.match(r"label_values\((\w+), zerotune_job\)", variable)[1] in exposed
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]}
    assert len(corners) == len(document["panels"])


@pytest.fixture
def served(store) -> Iterator[tuple[str, int]]:
    with server.make_server(Collector("ipc://x", store.path), ("127.0.0.1", 0)) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made.server_address[:2]
        finally:
            made.shutdown()
            thread.join()


def test_slow_scrapers_do_not_keep_others_from_being_served(served):
    """Whether they are silent or send a header byte by byte."""
    with contextlib.ExitStack() as stack:
        for said in (b"", b"GET /metrics HTTP/1.1\r\nX: ") * server.MAX_CONNECTIONS:
            stack.enter_context(socket.create_connection(served)).sendall(said)
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{served[1]}/metrics", timeout=20) as answer:
                assert "zerotune_up 1.0" in answer.read().decode()


def test_a_scraper_that_drips_is_hung_up_on(served, monkeypatch):
    monkeypatch.setattr(server, "CONNECTION_TIMEOUT_S", 0.5)
    with socket.create_connection(served) as one:
        one.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        one.settimeout(0.05)
        deadline_s = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline_s:
                one.sendall(b"a")
                with contextlib.suppress(TimeoutError):
                    assert one.recv(1) == b""
                    break
    assert time.monotonic() < deadline_s


def test_a_taken_port_is_told(store):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"{port}.*in use"):
            server.make_server(Collector("ipc://x", store.path), ("127.0.0.1", port))


def test_the_child_serves_and_ends(store):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        metrics_process(f"127.0.0.1:{port}", "ipc:///nowhere/d.sock", store.path, None) as served,
        urllib.request.urlopen(url, timeout=5) as answer,
    ):
        assert served == url
        assert "zerotune_up 0.0" in answer.read().decode()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=1)
