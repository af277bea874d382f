"""The real NCCL, where a GPU is lent: `pytest -m gpu`. Each test is one step of benchmarks/gpu/run.py.

No machine with a GPU was at hand yet; `make rehearse` runs them on the mock.
"""

import json
import os

import pytest
import torch

import benchmarks.gpu.run as driver
from benchmarks.rehearse.settings import FABRIC as REHEARSAL

OPTIONS = driver.LITTLE if REHEARSAL in os.environ else ("--minutes", "3")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(20 + 60 * float(OPTIONS[-1])),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch built for CUDA"),
]


@pytest.mark.parametrize("step", [step.name for step in driver.PROGRAMME])
def test_step(step, tmp_path):
    code = driver.main(["--out", str(tmp_path), "--only", step, *OPTIONS])
    (_, outcome) = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert (code, outcome["outcome"], outcome["reason"]) == (0, "ok", "")
