"""All of benchmarks/gpu/run.py that needs no GPU; the slow test runs its whole programme on the emulated NCCL."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import benchmarks.gpu.run as driver
from benchmarks.gpu import device_steps, steps, training
from benchmarks.gpu.answers import QUESTIONS, UNKNOWN, answers
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.ranks import Machine, Ranks, RanksFailed
from benchmarks.gpu.results import Record

RUN = Path(driver.__file__)
IDENTITY = {"identity": {"gpu": "H200", "nccl": "2.28.9", "driver": "570", "fabric": None}}


def options(tmp_path, *words):
    return driver.parse(["--out", str(tmp_path / "out"), *words])


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert driver.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "needs an NVIDIA GPU" in said.err


@pytest.mark.parametrize(
    "words",
    [
        *(["--only", "load,fly"], ["--ranks", "1"], ["--minutes", "0"], ["--minutes", "nan"], ["--steps", "-1"]),
        *(["--fabric", "nope"], ["--fabric", "h100_node", "--out", str(RUN)]),
    ],
)
def test_options_that_make_no_sense(words, capsys):
    with pytest.raises(SystemExit) as refused:
        driver.parse(words)
    assert refused.value.code == 2
    assert "error" in capsys.readouterr().err


def test_what_teaches_most_comes_first_and_fits():
    names = [step.name for step in driver.PROGRAMME]
    assert names[:3] == ["load", "forced", "times"]
    longest_s = sum(step.timeout_s for step in driver.PROGRAMME[: names.index("sweep")])
    assert longest_s <= 60 * driver.MINUTES


# ---- ranks ----


def test_ranks_with_gpus_of_their_own_are_one_host(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    environments = [Machine(None, 2, n_gpus=2).environment(rank, 2, 29500) for rank in range(2)]
    assert [each["LOCAL_RANK"] for each in environments] == ["0", "1"]
    assert not any(name.startswith(("NCCL_", "CUDA_")) for each in environments for name in each)


def test_ranks_share_a_gpu_as_hosts_of_their_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    environments = [Machine(None, 4).environment(rank, 4, 29500) for rank in range(4)]
    assert len({each["NCCL_HOSTID"] for each in environments}) == 4
    assert {each["CUDA_VISIBLE_DEVICES"] for each in environments} == {"3"}
    assert {each["LOCAL_RANK"] for each in environments} == {"0"}
    assert environments[0]["NCCL_NET"] == "Socket"
    assert environments[0]["NCCL_SOCKET_IFNAME"] == "lo"
    assert int(environments[0]["NCCL_MAX_CTAS"]) >= 16


def test_a_dry_run_never_touches_a_gpu():
    environment = Machine("ethernet_boxes", 2).environment(0, 2, 29500)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert not any(name.startswith("NCCL_") for name in environment)


def test_hung_ranks_are_killed_and_named(tmp_path):
    ranks = Ranks(Machine("x", 2), [sys.executable, "-S", "-c", "import time; time.sleep(100)"], tmp_path)
    with pytest.raises(RanksFailed, match=r"hung.*rank 0"):
        ranks.wait(0.3)
    assert not any(psutil.pid_exists(process.pid) for process in ranks.processes)


def test_the_last_words_of_a_failed_rank_are_kept_and_the_others_ended(tmp_path):
    program = "import os, sys, time; os.environ['RANK'] == '1' or time.sleep(100); print('NODEVICE'); sys.exit(3)"
    ranks = Ranks(Machine("x", 2), [sys.executable, "-S", "-c", program], tmp_path)
    began_s = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 .*3: NODEVICE"):
        ranks.wait(60)
    assert time.monotonic() - began_s < 30
    assert not any(psutil.pid_exists(process.pid) for process in ranks.processes)


# ---- the driver ----


def carry_out(tmp_path, programme, record=None, *words):
    record = record or Record(tmp_path / "out", IDENTITY)
    scratch = tmp_path / f"scratch{len(list(tmp_path.iterdir()))}"
    scratch.mkdir()
    driver.carry_out(programme, Machine(None, 2), scratch, record, options(tmp_path, *words))
    return record


def failing(error):
    def run(context):
        raise error

    return run


def test_a_step_that_goes_wrong_does_not_stop_the_next(tmp_path):
    programme = [
        steps.Step("one", 60, failing(steps.NotAsItMust("other setting", {"n": 1}))),
        steps.Step("two", 60, failing(RanksFailed("hung: rank 0"))),
        steps.Step("three", 60, failing(ZeroDivisionError("oh"))),
        steps.Step("four", 60, lambda context: {"n_hangs": 0}),
    ]
    record = carry_out(tmp_path, programme)
    outcomes = {name: (outcome.outcome, outcome.reason) for name, outcome in record.outcomes.items()}
    assert outcomes == {
        "one": ("failed", "other setting"),
        "two": ("error", "hung: rank 0"),
        "three": ("error", "ZeroDivisionError: oh"),
        "four": ("ok", ""),
    }
    assert record.outcomes["one"].results == {"n": 1}


def test_what_is_done_is_not_done_again_and_what_failed_is(tmp_path):
    n_runs = []
    programme = [
        steps.Step("good", 60, lambda context: n_runs.append("good") or {}),
        steps.Step("bad", 60, failing(RanksFailed("no"))),
    ]
    carry_out(tmp_path, programme)
    again = carry_out(tmp_path, [programme[0], steps.Step("bad", 60, lambda context: {})])
    assert n_runs == ["good"]
    assert again.is_done("bad")
    assert Record(tmp_path / "out", IDENTITY).is_done("bad")


def test_another_driver_or_gpu_starts_afresh(tmp_path):
    record = Record(tmp_path, IDENTITY)
    record.add(Outcome("load", "ok", 1.0, 60.0))
    record.add_sweep([{"asked": "baseline"}])
    other = Record(tmp_path, {"identity": {**IDENTITY["identity"], "driver": "580"}})
    assert not other.is_done("load")
    assert other.swept() == []
    assert not Record(tmp_path, IDENTITY).is_done("load")


def test_a_line_that_was_cut_off_loses_that_line_only(tmp_path):
    record = Record(tmp_path, IDENTITY)
    record.add(Outcome("load", "ok", 1.0, 60.0))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": "forced", "outc')
    assert set(Record(tmp_path, IDENTITY).outcomes) == {"load"}


def test_each_step_has_its_own_time_and_none_begins_when_the_budget_is_spent(tmp_path):
    seen = []
    programme = [steps.Step(name, limit, lambda context: seen.append(context.left_s) or {}) for name, limit in
                 (("short", 7), ("long", 900))]  # fmt: skip
    carry_out(tmp_path, programme, None, "--minutes", "0.5")
    assert 6 < seen[0] <= 7
    assert 25 < seen[1] <= 30
    slow = [steps.Step("slow", 7, lambda context: seen.append(context.left_s) or {})]
    carry_out(tmp_path, slow, None, "--minutes", str(10 * driver.MINUTES))
    assert 60 < seen[2] <= 70
    spent = carry_out(tmp_path, [steps.Step("late", 60, failing(AssertionError))], None, "--minutes", "0.08")
    assert spent.outcomes["late"].outcome == "skipped"


def test_the_summary_says_what_it_is_worth(tmp_path):
    record = Record(tmp_path / "real", {**IDENTITY, "mps": True})
    record.add(Outcome("load", "ok", 1.0, 60.0, {"tuner_abi": 5}))
    record.add(Outcome("soak", "error", 90.0, 90.0, {}, "hung | LATE"))
    said = record.summarise()
    for words in ("shared one GPU", "nccl: 2.28.9", "driver: 570", "MPS: True"):
        assert words in said
    assert "| load | ok | 1.0 | tuner_abi 5 |" in said
    assert "| soak | error | 90.0 | hung / LATE |" in said
    document = json.loads((tmp_path / "real" / "summary.json").read_text())
    assert document["command"]
    assert document["date"].startswith("20")
    dry = Record(tmp_path / "dry", {"identity": {"fabric": "ethernet_boxes"}}).summarise()
    assert "No GPU took part" in dry
    assert "shared one GPU" not in dry


def test_mps_is_used_only_when_it_is_there_and_serves(tmp_path, monkeypatch):
    asked = driver.parse([])
    monkeypatch.setenv("PATH", str(tmp_path))
    with driver.multi_process_service(asked, tmp_path, is_shared=True) as folder:
        assert folder is None
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text("#!/bin/sh\nexit 1\n")
    control.chmod(0o755)
    with driver.multi_process_service(asked, tmp_path, is_shared=True) as folder:
        assert folder is None
    with driver.multi_process_service(driver.parse(["--no-mps"]), tmp_path, is_shared=True) as folder:
        assert folder is None


# ---- judging ----


def test_which_interface_each_nccl_should_use():
    expected = {22105: 2, 22203: 3, 22304: 3, 22403: 4, 22707: 4, 22809: 5, 22907: 5, 23007: 6, 23202: 6}
    assert {version: steps.expected_tuner_abi(version) for version in expected} == expected


def case(asked, ran, correct=True, collective="all_gather"):
    names = ("algorithm", "protocol", "n_channels")
    return {
        "collective": collective, "message_bytes": 1 << 20, "correct": correct,
        "asked": dict(zip(names, asked, strict=True)), "ran": [dict(zip(names, each, strict=True)) for each in ran],
    }  # fmt: skip


def test_forced_settings_that_did_not_run_are_found():
    good = [case((1, 2, 4), [(1, 2, 4)]), case((6, 2, 16), [(6, 2, 8)])]
    assert steps.judge_forced(good) == {
        "n_cases": 2, "n_cells": 2, "n_other_setting": 0, "n_fewer_channels": 1, "n_wrong_sums": 0, "n_not_timed": 0
    }  # fmt: skip
    bad = [case((1, 0, 1), [(1, 2, 1)]), case((1, 0, 1), [(1, 0, 2)]), case((1, 0, 1), [], correct=False)]
    judged = steps.judge_forced(bad)
    assert (judged["n_other_setting"], judged["n_not_timed"], judged["n_wrong_sums"]) == (2, 1, 1)


TUNING_LOG = """\
host:70:70 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
host:70:81 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 9000 commId 0x5a - \
Init COMPLETE
host:70:81 [0] NCCL INFO AllGather: 262144 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..3}
host:70:81 [0] NCCL INFO ReduceScatter: 262144 Bytes -> Algo PAT proto SIMPLE channel{Lo..Hi}={0..0}
host:70:81 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..15}
"""


def test_nccls_own_tuning_log_confirms_or_contradicts(tmp_path):
    log = tmp_path / "nccl.log"
    log.write_text(TUNING_LOG)
    logged = steps.selections(log)
    assert logged == [("all_gather", 1 << 20, 1, 1), ("reduce_scatter", 1 << 20, 6, 2), ("all_reduce", 1 << 20, 0, 0)]
    asked = [
        case((1, 1, 4), []),
        case((6, 2, 1), [], collective="reduce_scatter"),
        case((0, 0, 16), [], collective="all_reduce"),
    ]
    assert steps.judge_log(asked, logged) == {"n_lines": 3, "n_confirmed": 3, "n_contradicted": 0}
    other = [*asked, case((1, 2, 4), []), case((1, 1, 8), [])]
    assert steps.judge_log(other, logged)["n_contradicted"] == 2


def test_the_best_setting_is_compared_with_nccls_own_choice():
    rows = [
        {"collective": "all_gather", "message_bytes": 4096, "asked": "baseline", "median_us": 90.0},
        {"collective": "all_gather", "message_bytes": 4096, "asked": "ring/ll/1ch", "median_us": 60.0},
        {"collective": "all_gather", "message_bytes": 4096, "asked": "pat/simple/1ch", "median_us": None},
        {"collective": "all_gather", "message_bytes": 65536, "asked": "baseline", "median_us": 50.0},
        {"collective": "all_gather", "message_bytes": 65536, "asked": "ring/ll/1ch", "median_us": 60.0},
        {"collective": "reduce_scatter", "message_bytes": 4096, "asked": "ring/ll/1ch", "median_us": 60.0},
    ]
    assert steps.best_against_default(rows) == {"all_gather 4096 ring/ll/1ch": 1.5}


def test_losses_are_compared_to_the_last_bit():
    assert training.compare_losses([[1.0, 2.0]], [[1.0, 2.0]]) == {
        "n_losses": 2, "same_bits": True, "largest_difference": 0.0
    }  # fmt: skip
    differing = training.compare_losses([[1.0, 2.0]], [[1.0, 2.0000001]])
    assert not differing["same_bits"]
    assert 1e-8 < differing["largest_difference"] < 1e-7
    with pytest.raises(ValueError, match=r"shorter|longer"):
        training.compare_losses([[1.0]], [[1.0, 2.0]])
    assert not training.compare_losses([[]], [[]])["n_losses"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_programme_on_the_emulated_nccl(tmp_path):
    """The very same scripts, so that a lent GPU's minutes are not spent on their mistakes."""
    options = ["--fabric", "ethernet_boxes", "--out", str(tmp_path), *driver.LITTLE, "--minutes", "20"]
    command = [sys.executable, "-m", "benchmarks.gpu.run", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in record[1:]] == [step.name for step in driver.PROGRAMME]
    by_name = {line["step"]: line["results"] for line in record[1:]}
    assert by_name["training"]["fsdp2"]["same_bits"]
    assert by_name["training"]["zero3"]["same_bits"]
    assert by_name["sweep"]["n_not_as_asked"] == 0
    rows = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert {row["collective"] for row in rows} == {"all_gather", "reduce_scatter"}
    assert any(row["asked"] == "baseline" and row["median_us"] > 0 for row in rows)
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert again.returncode == 0
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == len(record)


# ---- what a run answers ----

TIMES = [
    {"message_bytes": 4096, "profiler_us": 9.0, "event_us": 12.0, "timing_source": 1, "starts_ns": [1024, 3072, 8192]},
    {"message_bytes": 65536, "profiler_us": 97.0, "event_us": 100.0, "timing_source": 1, "starts_ns": [10240]},
]


def test_times_are_judged_against_events():
    found = device_steps.judge_times(TIMES)
    assert found["profiler_over_event_at_largest"] == 0.97
    assert found["timer_step_ns"] == 1024
    for wrong in ({"profiler_us": None}, {"profiler_us": 150.0}):
        with pytest.raises(steps.NotAsItMust):
            device_steps.judge_times([TIMES[0], TIMES[1] | wrong])


def test_each_question_is_answered_or_said_to_be_open(tmp_path):
    record = Record(tmp_path, {"identity": {"fabric": "x<y"}})
    record.add(Outcome("times", "ok", 1.0, 9.0, device_steps.judge_times(TIMES)))
    record.add(Outcome("capture", "ok", 1.0, 9.0, {"skipped": "no graphs"}))
    wrong = {"n_epochs": 2, "n_collectives": 90, "n_wrong": 1}
    record.add(Outcome("soak", "failed", 1.0, 9.0, wrong, "sums are wrong"))
    told = {step: answer for (_, step, _), (_, answer) in zip(QUESTIONS, answers(record.outcomes), strict=True)}
    assert "97.0 %" in told["times"]
    assert "graphs" in told["capture"]
    assert "wrong" in told["soak"]
    assert UNKNOWN in told["load"]
    text = record.summarise()
    assert all(question in text for question, _, _ in QUESTIONS)
    page = (tmp_path / "summary.html").read_text()
    assert "<svg" in page
    assert "x&lt;y" in page
    assert 'src="' not in page
    assert 'href="http' not in page
