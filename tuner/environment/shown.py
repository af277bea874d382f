"""Shows the trials of a training's environment, their results, and the next trial."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...agent.machine.nccl_variables import in_effect
from ...store.atomic_file import users_file
from ...store.counted import counted
from ...store.errors import UserError
from ...store.sqlite.database import Store
from .candidates import effect_of
from .history import History, history
from .proposal import candidates
from .trials import findings, kept, next_job

if TYPE_CHECKING:
    from rich.console import Console


def known(store_file: Path, job: str | None) -> History:
    """All starts of a job's training; of the newest such training if `job` is None. UserError: there is no such job."""
    with Store.open(store_file, read_only=True) as store:
        newest_first = [one for one in store.jobs()[::-1] if one.training]
        asked = [one for one in newest_first if job in (None, one.job_id, one.name)]
        training = asked[0].training if asked else ""
        if not training:
            which = "no job" if job is None else f"no job {job!r}"
            raise UserError(
                f"{which} in {store_file} was started with --tune-environment",
                "start a training with `zerotune launch --tune-environment`",
            )
        return history(store, training)


def document(found: History) -> dict[str, Any]:
    """Everything as JSON: kept variables, findings, the next trial."""
    choice = next_job(found.jobs, candidates(found, in_effect(os.environ)), elsewhere=found.elsewhere)
    return {
        "kept": kept(found.jobs),
        "findings": [
            {
                "change": one.change,
                "gain_percent": None if math.isnan(one.gain_share) else 100.0 * one.gain_share,
                "low_percent": None if math.isnan(one.low_share) else 100.0 * one.low_share,
                "high_percent": None if math.isnan(one.high_share) else 100.0 * one.high_share,
                "n_jobs": one.n_jobs,
                "is_banned": one.is_banned,
                "is_kept": one.is_kept,
                "why": one.why,
            }
            for one in findings(found.jobs)
        ],
        "jobs": [
            {"job": job_id, "variables": one.change, "step_us": one.step_us, "outcome": one.outcome.value}
            for job_id, one in zip(found.job_ids, found.jobs, strict=True)
        ],
        "next": {"variables": choice.change, "why": choice.why},
    }


def render(found: History, console: Console) -> None:
    """Print a table of changes, the kept variables and the next trial."""
    from rich.table import Table

    facts = document(found)
    table = Table(box=None, pad_edge=False)
    for head in ("change", "jobs", "steps faster by (90 %)", ""):
        table.add_column(head)
    for one in facts["findings"]:
        gain = "not measured"
        if one["gain_percent"] is not None:
            gain = f"{one['gain_percent']:.1f} % ({one['low_percent']:.1f} to {one['high_percent']:.1f})"
        table.add_row(one["change"], str(one["n_jobs"]), gain, one["why"])
    if facts["findings"]:
        console.print(table)
    console.print(f"{counted(len(found.jobs), 'start')} of this training; kept: {facts['kept'] or 'nothing yet'}")
    coming = facts["next"]["variables"] or "the usual environment"
    console.print(f"next, without --environment-file: {coming}: {facts['next']['why']}")


def render_advice(found: History, console: Console) -> None:
    """Print the changes that may be tried on that machine, the most promising first, and their effects."""
    in_force = kept(found.jobs).split()
    offered = [one for one in candidates(found, in_effect(os.environ)) if str(one) not in in_force]
    offered.sort(key=lambda one: found.elsewhere.get(str(one).lower(), (0.0, 0.0))[0])
    if not offered:
        console.print("nothing: no start of this training has told what its machine is, or you have set all of it")
    for one in offered:
        longer, _ = found.elsewhere.get(str(one).lower(), (0.0, 0.0))
        calls = f"  Calls took {abs(100 * math.expm1(longer)):.0f} % {'more' if longer > 0 else 'less'} on other nodes."
        console.print(f"{one}  {effect_of(one)}{calls if longer else ''}", highlight=False)


def export(store_file: Path, out: Path, job: str | None) -> list[str]:
    """Write the kept variables as lines that a shell can source; return a sentence about it.

    Raises:
        UserError: no variable is kept, or the file cannot be written.
    """
    found = known(store_file, job)
    variables = kept(found.jobs).split()
    if not variables:
        raise UserError("nothing is proven yet of this training's environment", "start it a few more times")
    with users_file(out) as path:
        path.write_text("# proven by zerotune: `set -a; . FILE; set +a`\n" + "".join(f"{one}\n" for one in variables))
    return [f"{counted(len(variables), 'variable')}, proven in {counted(len(found.jobs), 'start')}, written to {out}."]
