"""The status page in headless Chromium, beside a daemon and a job on the emulated NCCL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from watched_daemon import COMMAND, WAIT_S, daemon, status_page

pytest.importorskip("uvicorn")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'zerotune[browser]'")
RANKS = Path(__file__).parents[1] / "e2e" / "ranks.py"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EXAMPLE = "zerotune.zero_runtime.examples.train"
TRAIN = ["-m", EXAMPLE, "--stage", "3", "--batch", "2", "--layers", "2", "--steps", "100000"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_a_job_is_seen_as_it_trains(short_folder, tmp_path):
    """Give ZEROTUNE_SCREENSHOTS a folder to look at the page oneself."""
    shots = Path(os.environ.get("ZEROTUNE_SCREENSHOTS", tmp_path))
    with daemon(short_folder) as (_, endpoint), status_page(endpoint) as url:
        command = [*COMMAND, "launch", "--name", "gpt: 2 layers", "--fabric", "few_sms_node", "--endpoint", endpoint]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZEROTUNE_TICK_MS": "20"}
        words = [*command, "--", sys.executable, str(RANKS), "2", *TRAIN]
        with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            try:
                with playwright.sync_playwright() as driver:
                    browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                    problems: list[str] = []
                    for width, scheme in ((1360, "light"), (390, "dark")):
                        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                        page.set_default_timeout(1000 * 4 * WAIT_S)
                        page.on("pageerror", lambda error: problems.append(str(error)))
                        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
                        page.goto(url)
                        page.wait_for_selector(".pair b")
                        page.wait_for_selector(".decisions li")
                        assert "#" not in page.url
                        assert page.locator(".job h2").inner_text().startswith("gpt: 2 layers")
                        chart = page.locator(".chart")
                        chart.hover(position={"x": width // 2 - 40, "y": 80})
                        assert page.locator(".tip").inner_text()
                        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
                        # At once: what is drawn is replaced every second.
                        assert page.evaluate("document.querySelector('.meter i').getBoundingClientRect().width") > 0
                        page.screenshot(path=shots / f"status-page-{width}.png", full_page=True)
                    assert problems == []
                    browser.close()
            finally:
                job.terminate()
