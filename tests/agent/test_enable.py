"""`zerotune.enable()` never raises: a mistake is one line, and training runs as without us."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import zerotune, torch.distributed as dist
zerotune.enable({arguments})
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
print(dist.get_backend())
"""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param("fabric='nope'", "no fabric 'nope'", marks=pytest.mark.slow),
        ("fabric='as_believed', endpoint='junk'", "endpoint 'junk'"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: str, named: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(arguments=arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "gloo"
    (line,) = [line for line in done.stderr.splitlines() if "zerotune" in line]
    assert named in line
    assert "Traceback" not in done.stderr
