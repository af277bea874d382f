"""The real NCCL, where a GPU is lent: `pytest -m gpu`. Each test is one step of benchmarks/gpu/run.py.

These have never run yet: no machine with a GPU was at hand when they were written.
"""

import json

import pytest
import torch

import benchmarks.gpu.run as driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch built for CUDA"),
]


@pytest.mark.parametrize("step", [step.name for step in driver.PROGRAMME])
def test_step(step, tmp_path):
    code = driver.main(["--out", str(tmp_path), "--only", step, "--budget-s", "180"])
    (_, outcome) = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert code == 0, outcome
    assert outcome["outcome"] == "ok"
