"""`zerotune demo` (what `make run` runs): the whole loop on this machine, with no GPU.

A small GPT trains with ZeRO-3 on two ranks under the emulated NCCL, once with the agent off and once
with it on; the printed figures and the report come from those two runs and from the store.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ...agent.launch import make_writable
from ...agent.nccl import fabric as fabrics
from ...agent.nccl.release import release
from ...store.counted import faster
from ...store.errors import UserError
from ...store.foreign.own_python import python_with
from ...store.records import BASELINE, Candidate, Decision, size_class_range
from ...store.sqlite.database import Store
from ..client.background_daemon import start_in_background
from ..decided import n_tried, settled_decisions
from ..modeling.medians import MeasuredSetting, Medians, medians
from ..modeling.statistics import statistics
from ..offline.comparison import Comparison, compare
from ..offline.jobs.before_after import settled_of
from ..offline.size_ranges import exact_range
from ..scratch import ScratchFolder
from .progress import Progress

FABRIC = "few_sms_node"
"""A fabric on which NCCL's own choice is slow."""
N_RANKS = 2
N_STEPS = 300
LEAST_FREE_BYTES = 1 << 16
"""With less free space the disk counts as full: logs are then incomplete and do not show it."""
STALLS_AFTER_S = 300
"""A run without a finished step for this long is given up; the whole run has no time limit."""
_OUTPUTS = (
    "report.html",
    *(f"{name}.{kind}" for name in ("off", "on") for kind in ("json", "summary.json", "losses.jsonl", "log")),
)
"""Files that a run leaves beside the traces and the store, which the next run starts from."""
ENDING_TIMEOUT_S = 15
"""Time for torchrun to end its ranks."""


@dataclass(frozen=True)
class DemoRun:
    """A finished training run."""

    label: str
    steps: list[dict[str, Any]]
    loss_hex: list[str]
    losses: list[float]
    n_disagreements: int
    wall_s: float
    job_id: str = ""
    """The daemon's id of the run; empty if the agent was off."""

    def settled_us(self, field: str) -> float:
        """Median of `field` over the last quarter of the steps."""
        return float(median(step[field] for step in settled_of(self.steps)))


def demo(out: Path, console: Console, *, fabric: str = FABRIC, n_steps: int = N_STEPS) -> None:
    """Train without and with the agent, print the comparison, and leave a report and a store in `out`.

    Raises:
        UserError: `out` cannot be written, a run failed or did not reach the daemon, or the runs' losses differ.
    """
    fabrics.load(fabric)  # report a wrong name before anything is written
    modelled = release(os.environ)
    make_writable(out)
    for old in _OUTPUTS:
        (out / old).unlink(missing_ok=True)
    shutil.rmtree(_traces(out), ignore_errors=True)
    store_path = out / "store.db"
    earlier = _explored_so_far(store_path)
    console.print(
        f"[bold]Emulated fabric [cyan]{fabric}[/][/]: real training, real collectives, and a virtual clock in place "
        f"of a GPU cluster; settings are chosen by a model of {modelled}. These figures show the loop at "
        "work; they say nothing about a real network. "
        f"Two runs of {n_steps} steps follow; {N_STEPS} steps take half a minute to two minutes.",
        soft_wrap=True,
    )
    with ScratchFolder("zerotune-demo-") as runtime:
        endpoint = f"ipc://{runtime}/daemon.sock"
        off = _train(console, "agent off", out, fabric, n_steps, endpoint)
        console.print(f"agent off: {n_steps} steps in {off.wall_s:.1f} s of wall time")
        daemon = start_in_background(endpoint, store_path, log_path=out / "daemon.log")
        try:
            on = _train(console, "agent on", out, fabric, n_steps, endpoint, lambda: _lost(daemon, runtime, out))
        finally:
            daemon.terminate()
            daemon.wait(timeout=20)
        console.print(f"agent on:  {n_steps} steps in {on.wall_s:.1f} s of wall time")
    with Store.open(store_path, read_only=True) as store:
        job_id = on.job_id
        fabric_id = next((job.fabric_id for job in store.jobs() if job.job_id == job_id), None)
        if fabric_id is None:
            logs = f"see {out / 'daemon.log'} and {out / 'on.log'}"
            raise UserError("the ranks did not reach the daemon, so nothing was tuned", f"{logs}, and try again")
        decisions, n_explored = store.decisions(job_id=job_id), _n_explored(store, job_id)
        here, everywhere = (medians(statistics(store, fabric_id, of)) for of in (job_id, None))
    _print_comparison(console, off, on)
    print_decisions(console, decisions, here, everywhere)
    _print_checks(console, off, on, n_explored, earlier)
    write_summaries(out, fabric, off, on)
    from ..offline.report import gather, write_page

    report = out / "report.html"
    write_page(gather(store_path, job_id, [out / "off.json", out / "on.json"], [_traces(out)]), report)
    of_store, of_traces = shlex.quote(str(store_path)), shlex.quote(str(_traces(out)))  # for pasting into a shell
    console.print(
        f"report: {report}\nstore:  {store_path}  (try: zerotune explain --store {of_store})\n"
        # Policies that learn from earlier jobs find none here.
        f"trace:  {_traces(out)}  (try: zerotune replay {of_traces} --store {of_store} --policy tuner --policy oracle)",
        soft_wrap=True,
    )
    if off.loss_hex != on.loss_hex:
        raise UserError("the loss curves differ", f"please report this with {out}")


def _traces(out: Path) -> Path:
    return out / "traces"


def _train(
    console: Console,
    label: str,
    out: Path,
    fabric: str,
    n_steps: int,
    endpoint: str,
    check: Callable[[], None] | None = None,
) -> DemoRun:
    """Train once; the agent is on if there is a daemon, which `check` tests now and then."""
    name = "on" if check else "off"
    summary, losses, log = out / f"{name}.summary.json", out / f"{name}.losses.jsonl", out / f"{name}.log"
    command = [*python_with("zerotune.tuner.cli"), "launch", "--fabric", fabric, "--summary", str(summary)]
    command += ["--endpoint", endpoint, "--no-daemon"]  # a daemon started by `launch` would have another store
    command += ["--agent", "--log-trace", str(_traces(out))] if check else ["--no-agent"]
    command.append("--")
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N_RANKS}"]
    command += [
        "-m",
        "zerotune.zero_runtime.examples.train",
        "--stage",
        "3",
        "--batch",
        "2",
        "--layers",
        "3",
        "--steps",
        str(n_steps),
        "--losses",
        str(losses),
    ]
    began = time.monotonic()
    with log.open("wb") as output, Progress(console, f"training with the {label}", losses, n_steps) as progress:
        # Emulated steps are short: the agent reports more often, so that few steps suffice.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZEROTUNE_TICK_MS": "20"}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            returncode = progress.wait(process, STALLS_AFTER_S, check or (lambda: None))
        except TimeoutError:
            _end(process)
            raise UserError(f"training with the {label} stood still for {STALLS_AFTER_S} s", f"see {log}") from None
        except BaseException:
            _end(process)
            raise
    wall_s = time.monotonic() - began
    if returncode != 0:
        if shutil.disk_usage(out).free < LEAST_FREE_BYTES:
            raise UserError(f"training with the {label} failed: no room is left at {out}", "make some, or name another")
        words = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"training with the {label} failed: {' '.join(words)}", f"see {log}")
    lines = [json.loads(line) for line in losses.read_text().splitlines()]
    summary_json = json.loads(summary.read_text())
    return DemoRun(
        label,
        summary_json["steps"],
        [line["loss_hex"] for line in lines],
        [line["loss"] for line in lines],
        summary_json["n_disagreements"],
        wall_s,
        summary_json["job_id"],
    )


def _lost(daemon: subprocess.Popen[bytes], runtime: Path, out: Path) -> None:
    """Check that ranks can still reach the daemon."""
    if daemon.poll() is not None:
        raise UserError("the demo's daemon has ended, so nothing is tuned", f"see {out / 'daemon.log'}")
    if not (runtime / "daemon.sock").exists():
        problem = f"another program has removed {runtime}, the folder of the demo's daemon"
        raise UserError(problem, "try again, or set TMPDIR to a folder that nothing cleans")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to end before killing it: killed at once, it would leave its ranks behind."""
    process.terminate()
    try:
        process.wait(timeout=ENDING_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _explored_so_far(store_path: Path) -> int | None:
    """Explored decisions of the newest job already in the store; None on the first run."""
    if not store_path.exists():
        return None
    with Store.open(store_path, read_only=True) as store:
        jobs = store.jobs()
        return _n_explored(store, jobs[-1].job_id) if jobs else None


def _n_explored(store: Store, job_id: str) -> int:
    return n_tried(store.decisions(job_id=job_id), store.highest_epoch(job_id))


def _print_comparison(console: Console, off: DemoRun, on: DemoRun) -> None:
    table = Table(
        "", "agent off", "agent on", "change", title="Per step, median of the settled quarter (emulated time)"
    )
    for name, field in (("step time", "duration_us"), ("exposed communication", "exposed_us")):
        before, after = off.settled_us(field), on.settled_us(field)
        change = faster(100 * (after / before - 1), 1) if before else "-"
        table.add_row(name, f"{before:,.0f} us", f"{after:,.0f} us", change)
    console.print(table)
    if words := why_other(*(off.settled_us(field) - on.settled_us(field) for field in ("duration_us", "exposed_us"))):
        console.print(words)


def why_other(step_us: float, exposed_us: float) -> str:
    """Why a saved step time differs from the saved exposed communication; empty below a microsecond."""
    rest_us = step_us - exposed_us
    if abs(rest_us) < 1.0:
        return ""
    less, fewer = ("less", "fewer") if rest_us > 0 else ("more", "more")
    return (
        f"The computation of a step takes {abs(rest_us):,.0f} us {less}: channels hold multiprocessors of the GPU, and"
        f" the settings use {fewer} of them."
    )


def print_decisions(console: Console, decisions: list[Decision], here: Medians, everywhere: Medians) -> None:
    """Print the decision for each key beside its measurements, and medians of all jobs on the fabric."""
    table = Table("collective, phase", "message", "NCCL's own", "zerotune", title="Decisions, measured medians")
    settled = settled_decisions(decisions)
    if not settled:
        console.print("no setting was decided: so few steps leave nothing to compare")
        return
    for key in sorted(settled.keys() | here.keys()):
        low, high = size_class_range(key.size_class)
        own, chosen = _undecided(here[key]) if key not in settled else _decided(settled[key], here, everywhere)
        place = f"{key.collective.name}\n{key.phase.name}"
        table.add_row(place, exact_range(low, high).replace(" to ", " to\n") + " bytes", own, chosen, end_section=True)
    console.print(table)


def _decided(decision: Decision, here: Medians, everywhere: Medians) -> tuple[str, str]:
    found = compare(decision, here, everywhere)
    return f"{found.own or 'unknown'}\n{_us(found.own_us)}", _chosen(decision, found)


def _undecided(known: Mapping[Candidate, MeasuredSetting]) -> tuple[str, str]:
    """Rows for settings that ran without a decision: a later run tries nothing if no setting was better."""
    own = known.get(BASELINE)
    return (f"{own.setting}\n{_us(own.median_us)}" if own else "unknown\n-"), "the same: nothing decided in this run"


def _chosen(decision: Decision, found: Comparison) -> str:
    if decision.candidate.is_baseline:
        return "the same: nothing better found"
    return f"{decision.candidate}\n{_us(found.us)}" + (f" ({found})" if str(found) else "")


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} us"


def _print_checks(console: Console, off: DemoRun, on: DemoRun, n_explored: int, earlier: int | None) -> None:
    same = off.loss_hex == on.loss_hex and len(on.loss_hex) > 0
    n_disagreements = off.n_disagreements + on.n_disagreements
    console.print(
        f"loss curves: {'identical to the last bit' if same else '[red]DIFFERENT[/]'} over {len(on.losses)} steps "
        f"({on.losses[0]:.3f} -> {on.losses[-1]:.3f})"
    )
    console.print(f"calls on which ranks disagreed: {n_disagreements}")
    before = "" if earlier is None else f" (the run before: {earlier}; this one started from what it learned)"
    console.print(f"settings tried out: {n_explored}{before}")


def write_summaries(out: Path, fabric: str, off: DemoRun, on: DemoRun) -> None:
    """Write `off.json` and `on.json` in the format of `zerotune report --summary`, with their losses."""
    for name, run in (("off", off), ("on", on)):
        steps = [{**step, "loss_hex": loss} for step, loss in zip(run.steps, run.loss_hex[1:], strict=False)]
        document = {
            "label": run.label,
            "job_id": run.job_id,
            "emulated": True,
            "fabric": fabric,
            "steps": steps,
            "n_disagreements": run.n_disagreements,
        }
        (out / f"{name}.json").write_text(json.dumps(document))
