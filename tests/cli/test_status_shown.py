"""`zerotune status` on a narrow terminal: nothing that matters is cut."""

import io
import re

import msgspec
import pytest
from rich.console import Console

from zerotune.store import wire
from zerotune.store.passages import OtherPlugin, Passage, PassageKind, Passages
from zerotune.store.records import MissingEvidence, Stage
from zerotune.store.wire import DaemonOptions, EndedJob, JobStatus, StatusReply, StoreState
from zerotune.tuner.client.status import render_status, workload


def test_health_and_silence_are_whole_on_80_columns():
    job = JobStatus(
        "job-4cd4f0ec", "emulated-ethernet_boxes-45020b92a6bb", Stage.zero3, 2, 2, 10, 5500, 400, 0, 59, 472.0, 3230.0,
        0.39, ("epoch 10: explore [ring]",), "rank 1 is silent", 4.24,
    )  # fmt: skip
    out = io.StringIO()
    render_status(
        StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 70_000_000, 0, (job,)), Console(file=out, width=80)
    )
    text = out.getvalue()
    for words in (
        f"job-4cd4f0ec: {job.health}, ",
        job.fabric_id,
        "2 of 2 ranks",
        "70.0 MB",
        "[ring]",
    ):
        assert words in text


def test_a_workload_that_is_not_recognised_is_said_to_be_so():
    assert workload(Stage.zero3) == "workload zero3"
    assert workload(Stage.unknown, MissingEvidence.too_early).startswith(f"{workload(Stage.unknown)} yet")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (DaemonOptions(2.5, 0.8, True), "options --budget-percent 2.5 --memory-threshold 0.8"),
        (DaemonOptions(1.0, 0.92, False), "options --no-explore --memory-threshold 0.92"),
        (DaemonOptions(1.0, 0.92, True, shadow=True), "--shadow"),
        (None, ""),
    ],
)
def test_what_the_daemon_may_try_is_shown(options, shown: str):
    out = io.StringIO()
    reply = StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 70_000_000, 0, options=options)
    render_status(reply, Console(file=out, width=80))
    assert ("options" in out.getvalue()) == bool(shown)
    assert shown in out.getvalue()


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


def test_jobs_that_ended_are_shown_below_those_that_run():
    ended = (EndedJob("job-2", 1599, False, 12.0), EndedJob("job-1", 7, True, 300.0))
    words = shown(StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 1, 0, ended=ended))
    assert re.search("job-2: .* 12 s ago, .* 1,599", words)
    assert re.search("job-1: .*silent 300 s ago, .* 7$", words, re.MULTILINE)


@pytest.mark.parametrize("n_symmetric", [0, 1])
def test_shares_of_what_passed_the_tuner_by_are_shown_only_where_something_did(n_symmetric):
    kinds = [Passage(PassageKind.decided, 3, 3000, 3, 90.0), Passage(PassageKind.symmetric, 1, 1000, 1, 10.0)]
    seen = Passages(tuple(kinds[: 1 + n_symmetric]))
    job = JobStatus("job", "fabric", Stage.zero3, 1, 1, 0, 10, 0, 0, 0, 0.0, 0.0, 0.0, passages=seen)
    words = shown(StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 1, 0, (job,)))
    line = next((line for line in words.splitlines() if "symmetric" in line), "")
    assert re.findall(r"[\d.]+ %", line) == (["25.0 %", "10.0 %"] if n_symmetric else [])


def test_others_plugins_are_named_with_their_faults():
    seen = Passages(others=(OtherPlugin("tuner", "ofi", 1200), OtherPlugin("profiler", "inspector")))
    job = JobStatus("job", "fabric", Stage.zero3, 1, 1, 0, 10, 0, 0, 0, 0.0, 0.0, 0.0, passages=seen)
    words = shown(StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 1, 0, (job,)))
    assert "tuner ofi (1,200 faults)" in words
    assert "profiler inspector" in words


def test_communicators_of_one_rank_and_copies_have_no_times():
    seen = Passages((Passage(PassageKind.copy_engine, 4, 100),), 2)
    job = JobStatus("job", "fabric", Stage.zero3, 1, 1, 0, 10, 0, 0, 0, 0.0, 0.0, 0.0, passages=seen)
    words = shown(StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 1, 0, (job,)))
    assert "100.0 %" in words
    assert "2 communicators" in words


@pytest.mark.parametrize("n_impossible", [0, 1234])
def test_times_that_were_of_other_calls_are_counted(n_impossible):
    seen = Passages(n_impossible_times=n_impossible)
    job = JobStatus("job", "fabric", Stage.zero3, 1, 1, 0, 10, 0, 0, 0, 0.0, 0.0, 0.0, passages=seen)
    words = shown(StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 1, 0, (job,)))
    assert ("1,234" in words, "2.31" in words) == 2 * (n_impossible > 0,)


def test_decisions_that_shared_a_kernel_are_counted():
    seen = Passages(n_inseparable=1234)
    job = JobStatus("job", "fabric", Stage.zero3, 1, 1, 0, 10, 0, 0, 0, 0.0, 0.0, 0.0, passages=seen)
    assert "1,234 decisions" in shown(StatusReply(1, "0.1.0", "ipc:///tmp/x", "s.db", 3.0, 1, 0, (job,)))
