"""What a real Prometheus makes of the metrics: every question of the dashboard has an answer that names the job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.lib.free_port import free_port
from zerotune.store.records import Collective, Phase, Stage
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.store.wire import JobStatus, StatusReply
from zerotune.tuner.metrics import Collector, collector, dashboard, server

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on PATH (Debian: apt-get install prometheus)"),
]
JOBS = ("llama-7b", "gpt (two)")
"""The second has what a regular expression means otherwise."""
TEXT = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs:
  - job_name: zerotune
    static_configs: [{{targets: ['127.0.0.1:{port}']}}]
"""


def measured() -> np.ndarray:
    block = np.zeros(4, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"] = 4, 1, 1 << 20
    block["collective"], block["phase"] = Collective.all_gather, Phase.forward_gather
    block["algorithm"], block["protocol"], block["n_channels"], block["duration_us"] = 1, 2, 8, 100.0
    return block


@pytest.fixture
def exporter(tmp_path, monkeypatch):
    """Metrics over HTTP of two jobs that go on: each is measured every tenth of a second."""
    n_asked = 0

    def fetch(*_arguments, **_options):
        nonlocal n_asked
        n_asked += 1
        jobs = (
            JobStatus(job, "fabric", Stage.zero3, 4, 4, 7, 120, 9000 + n_asked, 1, 16, 800.0, 72_000.0, 0.4)
            for job in JOBS
        )
        return StatusReply(1, "0.1", "ipc://x", "s.db", 12.0, 5 << 20, 0, tuple(jobs), 2)

    monkeypatch.setattr(collector, "fetch_status", fetch)
    is_over = threading.Event()
    with Store.open(tmp_path / "s.db") as store:

        def train() -> None:
            while not is_over.wait(0.1):
                for job in JOBS:
                    store.record_measurements("fabric", job, measured())

        with server.make_server(Collector("ipc://x", store.path), ("127.0.0.1", 0)) as made:
            threads = [threading.Thread(target=made.serve_forever, args=(0.02,)), threading.Thread(target=train)]
            for thread in threads:
                thread.start()
            yield made.server_port
            is_over.set()
            made.shutdown()
            for thread in threads:
                thread.join()


@pytest.fixture
def ask(exporter, tmp_path):
    """Asks a Prometheus that scrapes the exporter: path below /api/v1 and parameters in, `data` out."""
    (tmp_path / "prometheus.yml").write_text(TEXT.format(port=exporter))
    port = free_port()
    command = [str(PROMETHEUS), f"--config.file={tmp_path / 'prometheus.yml'}", "--log.level=error"]
    command += [f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:

        def get(path: str, **parameters: str):
            url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)["data"]

        try:
            yield get
        finally:
            process.kill()


def answered(ask: Callable, wanted: Callable, path: str, **parameters: str):
    """The first answer that is as wanted: scrapes take their time."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            data = ask(path, **parameters)
            if wanted(data):
                return data
        except (urllib.error.URLError, ConnectionError):
            data = None  # it is starting
        assert time.monotonic() < deadline_s, (path, parameters, data)
        time.sleep(0.2)


def test_the_dashboard_has_its_answers(ask):
    document = dashboard()
    variable = document["templating"]["list"][0]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
    jobs = answered(ask, lambda found: len(found) == len(JOBS), f"label/{label}/values", **{"match[]": metric})
    assert sorted(jobs) == sorted(JOBS)

    for chosen in (*(re.escape(job) for job in JOBS), f"({'|'.join(map(re.escape, JOBS))})", ".*"):
        n_jobs = 1 if chosen in map(re.escape, JOBS) else len(JOBS)
        chosen = chosen.replace("\\", "\\\\")  # within a string of PromQL, as Grafana writes it
        for panel in document["panels"]:
            for target in panel["targets"]:
                asked = target["expr"].replace(f"${variable['name']}", chosen).replace("$__rate_interval", "3s")
                rows = answered(ask, lambda data: data["result"], "query", query=asked)["result"]
                told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert all(told <= row["metric"].keys() for row in rows), asked
                if label in told:
                    assert len(rows) == n_jobs, asked

    labels = set(ask("labels", **{"match[]": '{__name__=~"zerotune_.*"}'}))
    assert label in labels
    assert not [name for name in labels if name.startswith("exported_")], "Prometheus had to rename a label of ours"
