"""Every command that a page shows in a block is run, page by page: `pytest -m slow tests/docs`.

Each page has a home and a working folder of its own, as after a short job. Commands that do not end by themselves stay
in the background until the next such command, or the page's end. What neither runs nor stands in CANNOT_RUN fails.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.nccl import nccl_releases

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
BIN = Path(sys.executable).parent

CANNOT_RUN = {
    r"(\S*pip|git|python3? -m venv|ds/bin/\w+) ": "installs",
    r"make ": "makes environments; tests/docs/test_site.py and tests/packaging make what they make",
    r"(python -m )?pytest ": "tests of their own",
    r"(OMP_NUM_THREADS=1 )?\S*python -m benchmarks": "a GPU, a mock of one, or other libraries",
    r"\. \.venv/": "an environment in the checkout",
    r"NCCL_TOPO_DUMP_FILE=": "a GPU",
    r"(sbatch|kubectl|helm|mpirun|python deploy/ray/\S+) ": "a cluster; tests/deploy runs these files",
    r"(cp deploy/systemd/\S+|systemctl|systemd-analyze) ": "root, and systemd",
    r"zerotune sweep --ranks 8 ": "GPUs",
    r"zerotune launch -- torchrun --nnodes 4 ": "other nodes",
    r"zerotune doctor --nodes ": "other nodes; tests/doctor gives it a launcher",
    r"zerotune launch -- torchrun \S+ \S+ -m torchtitan": "torchtitan, which tests/frameworks runs",
    r"zerotune daemon --all-users ": "root; tests/all_users starts it",
    r"zerotune advise .* --watch ": "a running job of that model; tests/advice/test_advise_running_job.py watches one",
    r"zerotune store export proven\.env ": "several starts of a training; tests/environment proves a change",
    r"zerotune demo --out run$": "minutes; tests/e2e runs it",
}
"""Beginnings of commands, and what they need that is not here."""
RUN_ELSEWHERE = {"docs/operate/worked-example.md": "in a real Slurm, by tests/deploy/test_worked_example.py"}
ENDLESS = r"zerotune (daemon( --.*)?|status --web)$"
EXIT_CODES = {r"zerotune predict .* --plan ": (0, 1), r"zerotune doctor": (0, 1)}
"""Those that the pages name for what was found."""
DONE_BEFORE = {
    r"zerotune (status|daemon stop)": "zerotune status || zerotune launch -- true",
    r"zerotune sweep ": "zerotune daemon stop || true",
    r"zerotune daemon .*--curve-keys keys": "zerotune daemon keys keys",
    r"zerotune store book key ": "rm -f book.key*",
    r"zerotune report winners": "zerotune launch --fabric ethernet_boxes -- torchrun --nproc-per-node 2 earlier.py",
    r"zerotune store book build ": "rm -f fleet.book*",
}
"""What a reader has done who runs a command, or has not."""
NCCL = nccl_releases.library_of("2.27.7")
ELSEWHERE = {
    "--nproc-per-node 8": "--nproc-per-node 2",
    "7.5B --nodes 2 --measured": "125M --fabric ethernet_boxes --nodes 2 --measured",
    "--steps 400": "--steps 20",
    "--max-bytes 16777216": "--max-bytes 16384",
    "--max-bytes 1MiB": "--max-bytes 4KiB",
    "s3://bucket": "{work}/bucket",
    "/opt/nccl/2.27.7/lib/libnccl.so.2": "{nccl}",
    "2.25.1/libnccl.so.2": "{nccl}",
    "2.27.7/libnccl.so.2": "{nccl}",
    "/shared/": "{work}/shared/",
    "/var/lib/zerotune/": "{work}/",
    "sweep-20261121-105757": "{sweep}",
    "sweep-20261122-090000": "{sweep}",
    "tests/frameworks/": f"{ROOT}/tests/frameworks/",
}
"""What a command names that is another here."""
TRAINING = """
import torch, torch.distributed as dist, zerotune
dist.init_process_group()
part = torch.ones(1024)
for step in range(3):
    dist.all_reduce(part)
    zerotune.step_ended()
dist.destroy_process_group()
"""
"""A reader's train.py; without an optimizer, whose import takes longer than all else."""
EARLIER_JOB = """
import torch, torch.distributed as dist
from zerotune import zero_runtime
dist.init_process_group()
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(2)))
optimizer = zero_runtime.shard(model, stage=3).optimizer(torch.optim.AdamW)
for _ in range(1000):
    model(torch.randn(1, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8}
CONFIG |= {"intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def used() -> Iterator[Path]:
    """A folder with what a user has who comes to a page: a home after a short job, and `work` with the files named."""
    with tempfile.TemporaryDirectory(prefix="zt-") as folder:  # a short path: a socket's has 107 bytes at most
        made = Path(folder) / "used"
        (work := made / "work").mkdir(parents=True)
        (work / "train.py").write_text(TRAINING)
        (work / "earlier.py").write_text(EARLIER_JOB)
        (work / "config.json").write_text(json.dumps(CONFIG))
        files = ROOT / "benchmarks" / "field" / "files"
        shutil.copy(files / "rack_tray.xml", work / "t.xml")
        shutil.copy(files / "cloud_bare_gpus.xml", work / "ndv5-topo.xml")
        shutil.copy(ROOT / "tests/data/nccl_tests/quiet__all_gather.txt", work / "all_gather.log")
        shutil.copy(files / "all_reduce_then_heading_alone.log", work / "old.log")
        launch = "zerotune launch --fabric ethernet_boxes"
        for command in (
            f"{launch} --fleet bucket/zerotune --log-trace traces -- torchrun --nproc-per-node 2 earlier.py",
            "zerotune status | grep -o '[0-9a-f]\\{64\\}' > nodes.txt",
            "zerotune daemon stop",
            "zerotune store export plan.json && zerotune store export tuner.csv --to rccl-csv",
            "zerotune store book key book.key",
            "zerotune store book build bucket/zerotune --out fleet.book --sign book.key",
            "mkdir run && zerotune store backup run/store.db",
            "cp fleet.book old.book && cp fleet.book last-week.book && cp fleet.book bucket",
            "zerotune sweep --fabric ethernet_boxes --max-bytes 4KiB | grep -o 'sweep-[-0-9]*' > sweep",
        ):
            subprocess.run(["bash", "-ec", command], cwd=work, env=_environment(made), check=True, timeout=100)
        yield made


@pytest.mark.parametrize("name", [name for name in PAGES if name not in RUN_ELSEWHERE])
def test_every_command_of_a_page_runs(name: str, used: Path) -> None:
    commands = list(_commands((ROOT / name).read_text()))
    page, failures = Page(used), []
    try:
        failures = [f"{command}\n{failure}" for command in commands if (failure := page.run(command))]
    finally:
        failures = [*failures, *filter(None, [page.close()])]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def test_the_table_has_nothing_that_no_page_shows() -> None:
    commands = [command for name in PAGES for command in _commands((ROOT / name).read_text())]
    for pattern in (*CANNOT_RUN, *EXIT_CODES):
        assert any(re.match(pattern, command) for command in commands), pattern
    assert [words for words in ELSEWHERE if not any(words in command for command in commands)] == []


_TRAINED: set[str] = set()
"""Commands that start training and nothing else, which many pages show: each runs once."""


class Page:
    """A home and a working folder, and what runs there in the background."""

    def __init__(self, used: Path) -> None:
        self._folder = used.with_name(f"p{time.monotonic_ns()}")
        shutil.copytree(used, self._folder)
        self._environment = _environment(self._folder)
        self._endless: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> str:
        """Run a command as far as it can be; tells what went wrong, if anything."""
        if any(re.match(pattern, command) for pattern in CANNOT_RUN):
            return ""
        if exported := re.fullmatch(r"export (\w+)=(\S+)", self._here(command)):
            self._environment[exported[1]] = exported[2]
            return ""
        if command.startswith("zerotune daemon stop"):
            self._end()  # one that is this process's child would not be gone before this process asks for it
        for pattern, before in DONE_BEFORE.items():
            if re.match(pattern, command):
                self._run(before)
        if re.match(ENDLESS, command):
            return self._start(command)
        if (is_training := command.startswith("zerotune launch -- ")) and command in _TRAINED:
            return ""
        allowed = next((codes for pattern, codes in EXIT_CODES.items() if re.match(pattern, command)), (0,))
        done = self._run(self._here(command))
        if is_training:
            _TRAINED.add(command)
        fine = done.returncode in allowed and "Traceback" not in done.stderr
        return "" if fine else f"exit code {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"

    def close(self) -> str:
        """End what runs, and remove the folder."""
        failure = self._end()
        subprocess.run([BIN / "zerotune", "daemon", "stop"], env=self._environment, capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        return failure

    def _run(self, command: str) -> subprocess.CompletedProcess[str]:
        whole, folder = ["bash", "-c", command], self._folder / "work"
        return subprocess.run(
            whole, cwd=folder, env=self._environment, capture_output=True, text=True, timeout=100, check=False
        )

    def _start(self, command: str) -> str:
        failure = self._end()
        self._output = (self._folder / "output").open("w+")
        self._endless = subprocess.Popen(
            shlex.split("exec " + self._here(command), comments=True)[1:],
            cwd=self._folder / "work",
            env=self._environment,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        is_daemon = command.startswith("zerotune daemon")
        deadline = time.monotonic() + (30 if is_daemon else 4)
        while self._endless.poll() is None and time.monotonic() < deadline:
            if is_daemon and self._run("zerotune status").returncode == 0:
                break
            time.sleep(0.2)
        if self._endless.poll() is None:
            return failure
        return f"{failure} ended with {self._endless.returncode}: {self._said()}"

    def _end(self) -> str:
        if self._endless is None or self._endless.poll() is not None:
            return ""
        self._endless.send_signal(signal.SIGINT)
        code = self._endless.wait(30)
        return "" if code in (0, 130, -signal.SIGINT) else f"after Ctrl-C {code}: {self._said()}"

    def _said(self) -> str:
        self._output.seek(0)
        return self._output.read()[-2000:]

    def _here(self, command: str) -> str:
        sweep = (self._folder / "work" / "sweep").read_text().strip()
        here = {"work": self._folder / "work", "nccl": NCCL, "sweep": sweep}
        names = "|".join(map(re.escape, ELSEWHERE))
        return re.sub(names, lambda found: ELSEWHERE[found[0]].format(**here), command)


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZEROTUNE_", "NCCL_", "XDG_"))}
    return kept | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(folder),
        **{f"XDG_{name.upper()}_HOME": str(folder / name) for name in ("data", "state", "config", "cache")},
        "ZEROTUNE_RUNTIME_DIR": str(folder / "r"),
        "OMP_NUM_THREADS": "1",
        **({"NCCL_LIBRARY": str(NCCL)} if NCCL.exists() else {}),
    }


def _commands(text: str) -> Iterator[str]:
    """Commands of the blocks without a language, of those of shells, and what stands behind $ in a console."""
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE):
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(line.split())
            if language == "console":
                if not command.startswith("$ "):
                    continue
                command = command.removeprefix("$ ")
            if command:
                yield command
