"""What a real Prometheus makes of the metrics: every question of the dashboard has an answer that names the job, and
the alerts that are shipped go off when they should.
"""

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
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.lib.free_port import free_port
from zerotune.store.records import Collective, Phase, Stage
from zerotune.store.records.lateness import Lateness, LateRank
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.store.wire import JobStatus, StatusReply
from zerotune.tuner.metrics import Collector, collector, dashboard, server

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PROMETHEUS and PROMTOOL), reason="no prometheus on PATH (Debian: apt-get install prometheus)"
    ),
]
JOBS = ("llama-7b", "gpt (two)")
"""The second has what a regular expression means otherwise."""
TEXT = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: zerotune
    static_configs: [{{targets: ['127.0.0.1:{port}']}}]
"""


LATE = Lateness(wait_us=9000.0, transfer_us=4000.0, late=(LateRank(3, 9000.0, 0.92, 10, 9000, "node-c"),))


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
            JobStatus(
                job, "fabric", Stage.zero3, 4, 4, 7, 120, 9000 + n_asked, 1, 16, 800.0, 72_000.0, 0.4, lateness=LATE
            )
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
    (tmp_path / "prometheus.yml").write_text(TEXT.format(port=exporter, rules=RULES))
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


def test_alerts_are_evaluated_and_see_who_is_late(ask):
    def evaluated(data):
        rules = [rule for group in data["groups"] for rule in group["rules"]]
        return rules and all(rule["health"] == "ok" for rule in rules) and any(rule["alerts"] for rule in rules)

    found = answered(ask, evaluated, "rules")
    active = {rule["name"]: rule["alerts"] for group in found["groups"] for rule in group["rules"] if rule["alerts"]}
    assert set(active) == {"ZerotuneLateRank"}
    labels = [alert["labels"] for alert in active["ZerotuneLateRank"]]
    assert {(one["zerotune_job"], one["rank"], one["node"]) for one in labels} == {(job, "3", "node-c") for job in JOBS}


def test_promtool_likes_the_metrics(exporter):
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter}/metrics", timeout=5) as answer:
        text = answer.read()
    checked = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


ALERTS = {
    "ZerotuneDaemonDown": {"zerotune_up": "0x20"},
    "ZerotuneRanksMissing": {"zerotune_job_ranks_connected": "3x20", "zerotune_job_ranks": "4x20"},
    "ZerotuneLateRank": {"zerotune_job_rank_late_seconds": "0.01x20", "zerotune_job_step_seconds": "0.1x20"},
    "ZerotuneStoreLosesRecords": {"zerotune_store_lost_total": "0+5x20"},
    "ZerotuneStoreCannotBeWritten": {"zerotune_store_waiting": "7x20"},
    "ZerotuneDaemonFails": {"zerotune_daemon_errors_total": "0+1x20"},
}
QUIET = {
    "zerotune_up": "1x20",
    "zerotune_job_ranks_connected": "4x20",
    "zerotune_job_ranks": "4x20",
    "zerotune_job_rank_late_seconds": "0.001x20",
    "zerotune_job_step_seconds": "0.1x20",
    "zerotune_store_lost_total": "3x20",
    "zerotune_store_damaged": "0x20",
    "zerotune_store_waiting": "0x20",
    "zerotune_daemon_errors_total": "3x20",
}
"""What goes on for twenty minutes, a value a minute."""


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_goes_off_for_its_cause_alone(tmp_path, name):
    """promtool plays the values; the tables know every rule that is shipped."""
    assert set(ALERTS) == {
        rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    }
    labels = '{instance="n", zerotune_job="j"}'
    series = [{"series": metric + labels, "values": values} for metric, values in (QUIET | ALERTS[name]).items()]
    expected = [{"eval_time": "20m", "alertname": one, "exp_alerts": []} for one in ALERTS if one != name]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": expected}
    counted = {"expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})', "eval_time": "20m"}
    test["promql_expr_test"] = [counted | {"exp_samples": [{"labels": "{}", "value": 1}]}]
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    played = subprocess.run([str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert played.returncode == 0, played.stdout + played.stderr
