"""benchmarks/gpu/run.py without a GPU: it refuses in one line, and its whole programme runs on the emulated NCCL."""

import json
import os
import subprocess
import sys

import pytest

import benchmarks.gpu.run as driver


def test_without_a_gpu_the_driver_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert driver.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "needs an NVIDIA GPU" in said.err


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
