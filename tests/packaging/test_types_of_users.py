"""mypy finds the public names with their types, in a user's project, from the wheel and from an editable install."""

import re
import sys

import pytest
from builds import Environment, run

SCRIPT = """
import zerotune
from zerotune import zero_runtime

zerotune.enable(fabric="ethernet_boxes")
zerotune.step_ended()
zerotune.training_ended()
zero_runtime.Settings(stage=3)

zerotune.enable(fabric=1)
zerotune.step_ended(1)
zerotune.__version__ + 1
zero_runtime.Settings(stage="all")
"""
MISTAKES = ["arg-type", "call-arg", "operator", "arg-type"]
"""Of the script's last lines, as mypy calls them."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_mypy_sees_mistakes_in_calls_of_ours_and_nothing_else(built, tmp_path, kind):
    environment = Environment(tmp_path / "e")
    environment.install(built(kind))
    (tmp_path / "train.py").write_text(SCRIPT)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", environment.python)
    done = run(*mypy, "train.py", cwd=tmp_path, exit_code=1)
    assert re.findall(r"error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE) == MISTAKES
