"""The units of deploy/systemd, as systemd itself reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/operate/shared-machines.md").read_text()
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_sound_and_as_closed_as_the_page_says(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    is_there = f"ExecStart={shutil.which('true')}"
    copy.write_text(re.sub(r"^ExecStart=\S+", is_there, unit.read_text(), flags=re.MULTILINE))
    checked = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(copy)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    exposure = re.search(rf"{re.escape(unit.name)}: ([0-9.]+)", judged)
    assert exposure is not None
    said = re.search(rf"`deploy/systemd/{re.escape(unit.name)}` .*\| ([0-9.]+) \|", PAGE)
    assert said is not None
    assert float(exposure[1]) == pytest.approx(float(said[1]), abs=0.5), "releases of systemd weigh differently"
