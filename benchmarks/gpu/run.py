"""The first minutes of the real NCCL, on one GPU or several; the most informative steps come first.

python -m benchmarks run [--minutes 14]           on a machine with NVIDIA GPUs
python -m benchmarks run --fabric ethernet_boxes  the same scripts on the emulated NCCL, without a GPU
make rehearse REHEARSE="--only gpu-run"           the same, and torch's CUDA build with NCCL's own library

An interrupted run keeps its results; the same command goes on from there (--afresh starts over). summary.md has them.
Exit codes: 0 all is right, 1 something is wrong, 2 there is no GPU or an option makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.device_steps import ahead, beside, capture, observing, times
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.ranks import Machine, RanksFailed
from benchmarks.gpu.results import Record
from benchmarks.gpu.steps import Context, NotAsItMust, Step, forced, load, scratch_is_short, soak, sweep
from benchmarks.gpu.training import kill_daemon, overhead, training, tuned
from benchmarks.rehearse.settings import FABRIC as REHEARSAL
from zerotune.agent.machine.identity import nccl_version
from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.errors import FabricError

PROGRAMME = (
    Step("load", 60, load),
    Step("forced", 75, forced),
    Step("times", 45, times),
    Step("ahead", 40, ahead),
    Step("soak", 90, soak),
    Step("observing", 60, observing),
    Step("training", 110, training),
    Step("capture", 40, capture),
    Step("beside", 60, beside),
    Step("kill-daemon", 70, kill_daemon),
    Step("sweep", 130, sweep),
    Step("overhead", 110, overhead),
    Step("tuned", 110, tuned),
)
"""The most valuable first."""
LITTLE = ("--ranks", "2", "--collectives", "3000", "--steps", "20", "--pairs", "1", "--minutes", "50")
"""Options for a slow host without a GPU."""
RESULTS = Path(__file__).parents[1] / "results"
MINUTES = 14.0
SHARING = 4
"""Ranks that share one GPU."""
LEAST_S = 10.0
"""With less time left than this, a step is not begun."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    n_gpus = 0 if options.fabric else count_gpus()
    n_ranks = options.ranks or (n_gpus if n_gpus > 1 else SHARING)
    environment = describe(options.fabric, n_ranks, n_gpus)
    if environment is None:
        print(
            "benchmarks/gpu/run.py: needs an NVIDIA GPU and a torch built for CUDA; "
            "--fabric NAME runs the same scripts on the emulated NCCL",
            file=sys.stderr,
        )
        return 2
    programme = [step for step in PROGRAMME if not options.only or step.name in options.only]
    name = f"dry-{Path(options.fabric).stem}" if options.fabric else "rehearsal" if REHEARSAL in os.environ else "gpu"
    with scratch_folder() as scratch, multi_process_service(options, scratch, is_shared=n_gpus < n_ranks) as mps_folder:
        record = Record(options.out or RESULTS / name, {**environment, "mps": bool(mps_folder)}, afresh=options.afresh)
        machine = Machine(options.fabric, n_ranks, mps_folder, n_gpus)
        carry_out(programme, machine, scratch, record, options)
        print(record.summarise())
    print(f"written to {record.folder}")
    return 0 if all(record.is_done(step.name) for step in programme) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in PROGRAMME]
    parser.add_argument("--fabric", help="no GPU: the emulated NCCL on this fabric")
    parser.add_argument("--ranks", type=int, help=f"default: one for each GPU; of one GPU, {SHARING}")
    parser.add_argument("--out", type=Path, help="folder for results; default: benchmarks/results/gpu or dry-NAME")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all steps together, default {MINUTES:g}")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"of {', '.join(names)}")
    parser.add_argument("--afresh", action="store_true", help="forget what an earlier run has done")
    parser.add_argument("--no-mps", action="store_true", help="do not try the multi-process service")
    parser.add_argument("--collectives", type=int, default=10_000, help="of the soak, per rank")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--pairs", type=int, default=2, help="interleaved runs with and without the agent")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(names):
        parser.error(f"unknown step {sorted(unknown)[0]!r}: use some of {', '.join(names)}")
    numbers = (options.minutes, options.collectives, options.steps, options.pairs)
    too_few = options.ranks is not None and options.ranks < 2
    if too_few or not all(0 < number < math.inf for number in numbers):  # no NaN either
        parser.error("--ranks must be 2 or more, all other numbers positive")
    if options.fabric is not None:
        try:
            fabrics.load(options.fabric)
        except FabricError as error:
            parser.error(f"--fabric: {error}")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file; name a folder")
    return options


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def describe(fabric: str | None, n_ranks: int, n_gpus: int) -> dict[str, Any] | None:
    import torch

    identity: dict[str, Any] = {"fabric": fabric, "torch": torch.__version__, "n_ranks": n_ranks}
    if fabric is not None:
        return {"identity": identity}
    if not torch.cuda.is_available():
        return None
    if REHEARSAL in os.environ:
        identity["rehearsal"] = os.environ[REHEARSAL]
    properties, version = torch.cuda.get_device_properties(0), nccl_version()
    identity |= {
        "gpu": properties.name,
        "n_gpus": n_gpus if n_gpus >= n_ranks else 1,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "nccl": ".".join(map(str, (version // 10000, version // 100 % 100, version % 100))),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }
    return {"identity": identity, "n_cores": os.cpu_count()}


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # the run is useful even without NVML
        return f"unknown ({error})"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder with a short name: the paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="zt") as name:
        folder = Path(name)
        if not scratch_is_short(folder):
            raise SystemExit(f"the temporary folder {folder} has too long a name for sockets; set TMPDIR")
        yield folder


@contextlib.contextmanager
def multi_process_service(options: argparse.Namespace, scratch: Path, *, is_shared: bool) -> Iterator[Path | None]:
    """A private MPS daemon if the machine has one; it needs no setting of the card."""
    control = shutil.which("nvidia-cuda-mps-control") if is_shared else None
    if options.fabric is not None or options.no_mps or control is None:
        yield None
        return
    pipes = scratch / "mps"
    pipes.mkdir()
    environment = {
        **os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }  # fmt: skip
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    # It may start and yet serve nobody, in a container for example.
    probe = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"]
    serves = _succeeds([control, "-d"], 20, quiet) and _succeeds(probe, 40, quiet)
    try:
        yield pipes if serves else None
    finally:
        _succeeds([control], 20, quiet | {"input": b"quit\n"})


def _succeeds(command: Sequence[str], timeout_s: float, options: dict[str, Any]) -> bool:
    try:
        return subprocess.run(command, timeout=timeout_s, check=False, **options).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def carry_out(
    programme: Sequence[Step], machine: Machine, scratch: Path, record: Record, options: argparse.Namespace
) -> None:
    """Carry out every step that has not been done, within its own limit and the whole run's."""
    ends_s = time.monotonic() + 60.0 * options.minutes
    scale = max(1.0, options.minutes / MINUTES)  # a slow machine is given more time, for each step too
    for step in programme:
        if record.is_done(step.name):
            continue
        left_s = ends_s - time.monotonic()
        if left_s < LEAST_S:
            record.add(Outcome(step.name, "skipped", 0.0, step.timeout_s, reason="no time was left"))
            continue
        outcome = carry_out_one(step, machine, scratch, record, options, min(scale * step.timeout_s, left_s))
        record.add(outcome)
        print(f"{step.name}: {outcome.outcome} in {outcome.seconds:.1f} s {outcome.reason}", file=sys.stderr)


def carry_out_one(
    step: Step, machine: Machine, scratch: Path, record: Record, options: argparse.Namespace, timeout_s: float
) -> Outcome:
    """Carry out one step; an exception becomes its outcome."""
    folder = scratch / step.name
    folder.mkdir()
    began_s = time.monotonic()
    context = Context(machine, folder, record, began_s + timeout_s, options.collectives, options.steps, options.pairs)
    outcome, results, reason = "ok", {}, ""
    try:
        results = step.run(context)
    except NotAsItMust as wrong:
        outcome, results, reason = "failed", wrong.results, str(wrong)
    except RanksFailed as failed:
        outcome, reason = "error", str(failed)
    except Exception as error:  # the next step may still work
        outcome, reason = "error", f"{type(error).__name__}: {error}"
    return Outcome(step.name, outcome, time.monotonic() - began_s, timeout_s, results, reason)


if __name__ == "__main__":
    sys.exit(main())
