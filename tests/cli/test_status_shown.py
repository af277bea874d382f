"""`zerotune status` on a narrow terminal: nothing that matters is cut."""

import io
import re
import socket

import msgspec
from rich.console import Console

from zerotune.agent.daemon_link import node_service
from zerotune.store import wire
from zerotune.store.paths import default_endpoint
from zerotune.store.records import Stage
from zerotune.store.wire import DaemonOptions, JobStatus, StatusReply, StoreState
from zerotune.tuner.client.status import no_answer, render_status


def test_daemons_of_before_and_after_understand_one_another():
    """An older daemon says no options; an older client passes over them."""
    reply = StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 1, 0, options=DaemonOptions(1.0, 0.92, True))
    header, body = wire.encode(reply)
    fields = msgspec.msgpack.decode(body)
    without = msgspec.msgpack.encode({name: value for name, value in fields.items() if name != "options"})
    assert wire.decode_daemon([header, without]) == msgspec.structs.replace(reply, options=None)
    beyond = msgspec.msgpack.encode({**fields, "of_a_newer_daemon": {"a": 1}})
    assert wire.decode_daemon([header, beyond]) == reply


def shown(reply: StatusReply) -> str:
    out = io.StringIO()
    render_status(reply, Console(file=out, width=80))
    return out.getvalue()


def test_a_store_that_cannot_be_written_is_said_with_why_since_when_and_what_to_do(tmp_path):
    reply = StatusReply(1, "0.1.0", "ipc:///tmp/x", str(tmp_path / "s.db"), 3.0, 1, 0)
    assert not [words for words in ("degraded", "lost") if words in shown(reply)]
    full = "database or disk is full"
    out = StoreState(True, full, 12.3, 4108, 0)
    words = shown(msgspec.structs.replace(reply, store=out, health="degraded"))
    assert re.search(f"degraded: .* 12 s: {full}", words)
    assert "4,108 records waiting" in words
    assert f"{tmp_path}, " in words
    assert " free)" in words
    words = shown(msgspec.structs.replace(reply, store=msgspec.structs.replace(out, n_lost=1), health="degraded"))
    assert "1 record lost" in words
    words = shown(msgspec.structs.replace(reply, store=StoreState(False, "disk I/O error", 60.0, 0, 1200)))
    assert re.search(r"1,200 records lost, .* 60 s ago \(disk I/O error\)", words)
    assert "degraded" not in words
    words = shown(msgspec.structs.replace(reply, store=StoreState(is_gone=True), health="degraded"))
    assert re.search("degraded: .*`kill 1`", words)


def test_status_shows_who_tunes_a_job_and_where_nodes_connect():
    job = JobStatus("job", "fabric", Stage.zero3, 8, 8, 3, 200, 0, 0, 0, 0.0, 1.0, 0.0)
    reply = StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 1, 0, jobs=(job,))
    assert not [words for words in ("frozen", "daemon at", "reach") if words in shown(reply)]
    frozen = msgspec.structs.replace(job, frozen_since=120)
    other = msgspec.structs.replace(job, stage=Stage.unknown, health="forwards to tcp://a:5577")
    words = shown(msgspec.structs.replace(reply, jobs=(frozen, other), listen="tcp://b:5577"))
    assert "workload zero3, tuning frozen since step 120" in words
    assert "tuned by the daemon at tcp://a:5577" in words
    assert "not recognised" not in words
    assert "other nodes reach it at tcp://b:5577" in words


def test_a_service_for_all_users_is_named_before_the_first_job(tmp_path, monkeypatch):
    for name in ("ZEROTUNE_ENDPOINT", "ZEROTUNE_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_service, "SERVICE_RUNTIME_DIR", str(tmp_path))
    assert "no daemon answers" in str(no_answer(default_endpoint(), None))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / node_service.SERVICE_DOOR))
        assert "service for all users" in str(no_answer(default_endpoint(), None))
        assert "no daemon answers" in str(no_answer("ipc:///elsewhere/d.sock", None))
