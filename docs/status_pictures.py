"""Pictures of the status page, docs/pictures/status-wide.png and status-phone.png.

`python docs/status_pictures.py` trains what `zerotune demo` does until its gain is known, and takes them. It needs
`zerotune[dashboard,browser]` and a Chromium on the PATH.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PICTURES: Final = ROOT / "docs" / "pictures"
MAX_BYTES: Final = 120_000
WAIT_MS: Final = 240_000
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
VIEWS: Final = (("status-wide", 1200, 780, "light"), ("status-phone", 360, 1100, "dark"))
TRAIN: Final = ("-m", "zerotune.zero_runtime.examples.train", "--stage", "3", "--batch", "2", "--layers", "3")


def main() -> None:
    """Train, wait for the gain, and take the pictures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no pictures: none of {', '.join(BROWSERS)} is on the PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("no pictures: pip install 'zerotune[browser]'")
    with tempfile.TemporaryDirectory(prefix="zt-") as folder, sync_playwright() as driver:
        endpoint, command = f"ipc://{folder}/d.sock", [sys.executable, "-m", "zerotune.tuner.cli"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started: list[subprocess.Popen[str]] = []

        def start(*words: str, **options: Any) -> subprocess.Popen[str]:
            started.append(subprocess.Popen([*command, *words], env=environment, text=True, **options))
            return started[-1]

        try:
            start("daemon", "--endpoint", endpoint, "--store", f"{folder}/store.db", stdout=subprocess.DEVNULL)
            ranks = (sys.executable, str(ROOT / "tests" / "e2e" / "ranks.py"), "2", *TRAIN, "--steps", "100000")
            launch = ("launch", "--name", "gpt", "--fabric", "few_sms_node", "--endpoint", endpoint, "--", *ranks)
            start(*launch, stdout=subprocess.DEVNULL)
            web = ("status", "--web", "--endpoint", endpoint, "--listen", "127.0.0.1:0")
            page_of = start(*web, stdout=subprocess.PIPE)
            assert page_of.stdout is not None
            url = page_of.stdout.readline().split()[-1]
            chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-lcd-text"])
            for name, width, height, scheme in VIEWS:
                page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(url)
                page.get_by_text("against NCCL's own choice").wait_for(timeout=WAIT_MS)
                path = PICTURES / f"{name}.png"
                path.write_bytes(page.screenshot())
                n_bytes = path.stat().st_size
                print(f"{path.relative_to(ROOT)}: {n_bytes:,} bytes")
                if n_bytes > MAX_BYTES:
                    sys.exit(f"{path.name} is larger than {MAX_BYTES:,} bytes")
            chromium.close()
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(60)


if __name__ == "__main__":
    main()
