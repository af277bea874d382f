"""The facts of a report, read from the store and from run summaries; no HTML and no pictures here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....store.errors import UserError
from ....store.records import (
    Decision,
    DecisionKey,
    JobRecord,
    MissingEvidence,
    Outcome,
    Source,
    StepRecord,
    TimingSource,
)
from ....store.sqlite.database import Store
from ...client.beside import beside
from ...client.late import late, was_late
from ...client.mistimed import mistimed
from ...client.passed_by import passed_by
from ...decided import decisions_that_ran, n_tried, settled_decisions, since_takeover
from ...modeling.medians import Medians, medians
from ...modeling.statistics import statistics
from ..comparison import Comparison, compare
from ..explaining.job import why_unknown
from ..explaining.keys import by_keys, explained, news_of
from ..explaining.values import Explanation
from ..jobs.before_after import BeforeAfter, JobsRead, is_of_pace, of_job, of_summaries
from ..jobs.finding import job_of
from ..jobs.summary import RunSummary, check_alike, compared_job, read_summary
from ..replay.reading import load_table
from ..replay.table import CollectiveTable

Array = NDArray[Any]


@dataclass(frozen=True)
class Facts:
    """Everything the page shows about one job."""

    job: JobRecord
    fabric: dict[str, str | int | float | bool]
    steps: Sequence[StepRecord]
    decisions: Sequence[Decision]
    measurements: Array
    before: RunSummary | None
    after: RunSummary | None
    before_after: BeforeAfter
    here: Medians
    """Measured medians of this job."""
    everywhere: Medians
    """Measured medians of all jobs on the job's fabric."""
    traced: Sequence[CollectiveTable] = ()
    """Traces of the runs before and after, for timelines."""
    trace_paths: Sequence[Path] = ()

    @property
    def emulated(self) -> str:
        """Name of the emulated fabric; empty: NCCL was real."""
        return str(self.fabric.get("emulated", ""))

    def settled(self) -> dict[DecisionKey, Decision]:
        """The last decision on every key, trials left out."""
        return settled_decisions(since_takeover(self.decisions))

    @property
    def highest_epoch(self) -> int | None:
        """The highest epoch of the plans under which its steps ran; None: no step is recorded."""
        return max((step.epoch for step in self.steps), default=None)

    def in_force(self) -> dict[DecisionKey, Decision]:
        """The last decision on every key whose plan was adopted."""
        current = set(since_takeover(self.decisions))
        ran = decisions_that_ran(self.decisions, self.highest_epoch)
        return settled_decisions(one for one in ran if one in current)

    def against_own(self, decision: Decision) -> Comparison:
        """Compare a decision's setting with NCCL's own choice."""
        return compare(decision, self.here, self.everywhere)

    @property
    def missing_evidence(self) -> MissingEvidence:
        """Why its collectives do not show its kind of training."""
        return why_unknown(self.job, self.here, self.steps)

    @property
    def changes_at(self) -> list[int]:
        """Steps at which training itself, or the network, became faster or slower."""
        return [one.step for one in self.decisions if is_of_pace(one) and one.step is not None]

    @property
    def n_steps(self) -> int:
        """Number of begun steps, including those without a time."""
        return 1 + max((step.step for step in self.steps), default=-1)

    @property
    def untimed(self) -> list[str]:
        """Number of steps without a time, and why."""
        numbers = {step.step for step in self.steps}
        is_first_untimed = bool(numbers) and 0 not in numbers
        n_missing = self.n_steps - len(numbers) - is_first_untimed
        reasons = []
        if is_first_untimed:
            reasons.append("the first has none: a step's time runs from the end of the step before")
        if n_missing:
            reasons.append(f"of {n_missing} no daemon heard: none ran then, or what it was sent was dropped")
        return reasons

    def explained(self) -> list[Explanation]:
        """Every key with a decision of the daemon that decided last, as in `zerotune explain`."""
        news, current = news_of(self.decisions), set(since_takeover(self.decisions))
        by_key = by_keys(self.decisions)
        found = explained(by_key, self.here, self.everywhere, {}, news, current, self.highest_epoch)
        return [one for one in found if one.decision is not None]

    def collectives_us(self) -> tuple[float, float] | None:
        """Time of a step's decided collectives by their medians (us): under NCCL's own choice, and under decisions.

        This is not the step's gain, as hidden communication gains nothing. None: nothing was measured, or no plan was
        adopted.
        """
        if self.highest_epoch == 0:
            return None
        n_steps = len(np.unique(self.measurements["step"]))
        own_us = us = 0.0
        for key, decision in self.in_force().items():
            found = self.against_own(decision)
            if found.is_measured and found.own_us is not None and found.us is not None:
                n_calls = sum(one.n_calls for one in self.here.get(key, {}).values()) / n_steps if n_steps else 0.0
                own_us += n_calls * found.own_us
                us += n_calls * found.us
        return (own_us, us) if own_us else None

    @property
    def is_of_training(self) -> bool:
        """False for a sweep or an import, which have no page; true for a job without records, which may be new."""
        ran_here = bool(self.job.n_ranks)  # a job's hello has its number of ranks; imported measurements do not
        is_other = len(self.measurements) and not (ran_here and (self.measurements["source"] == Source.live).any())
        return not is_other or bool(self.steps or self.decisions or self.before or self.traced)

    def n_explored(self) -> int:
        """Number of trials that ran."""
        return n_tried(self.decisions, self.highest_epoch)


def gather(
    store_path: Path, job_id: str | None = None, summaries: Sequence[Path] = (), traces: Sequence[Path] = ()
) -> Facts:
    """Gather the facts about a job.

    Args:
        job_id: id or name of the job; None: the newest that trained.
        summaries: none, or two files of `launch --summary`: before and after.
        traces: folders of `launch --log-trace`: one, or two: before and after.

    Raises:
        UserError: there is no such store or job, a summary is invalid, or there are too many files.
    """
    runs = [read_summary(path) for path in summaries]
    if len(runs) not in (0, 2):
        raise UserError(f"{len(runs)} run summaries", "give two: before and after")
    if runs:
        check_alike(*runs)
    if len(traces) > 2:
        raise UserError(f"{len(traces)} traces", "give one, or two: before and after")
    with Store.open(store_path, read_only=True) as store:
        job = job_of(store, job_id) if not runs else compared_job(store, job_id, runs[1])
        read = JobsRead(store)
        steps, decisions = read.steps(job.job_id), read.decisions(job.job_id)
        measurements = store.measurements(job_id=job.job_id, chunk_bytes=None)
        fabric = store.fabrics().get(job.fabric_id, {})
        compared = of_summaries(runs[0], runs[1], job.job_id) if runs else of_job(read, job)
        here, everywhere = (medians(statistics(store, job.fabric_id, of)) for of in (job.job_id, None))
    before, after = runs or (None, None)
    traced = [load_table(path, likely_job_id=job.job_id) for path in traces]
    return Facts(
        job, fabric, steps, decisions, measurements, before, after, compared, here, everywhere, traced, tuple(traces)
    )  # fmt: skip


TRAIN_FIRST: Final = "name a job that trained with --job, or train one first"


def untrained(facts: Facts) -> UserError:
    """The error for a job that did not train."""
    # Measurements imported as live ran in a job of another store.
    kinds = (
        ((Source.sweep,), "measurements of a sweep"),
        ((Source.imported, Source.live), "imported measurements"),
    )
    counts = [(int(np.isin(facts.measurements["source"], of).sum()), words) for of, words in kinds]
    known = " and ".join(f"{n_rows:,} {words}" for n_rows, words in counts if n_rows)
    return UserError(f"job {facts.job.job_id} did not train: the store has {known} of it", TRAIN_FIRST)


def trust(facts: Facts) -> list[tuple[str, str]]:
    """(fact, how far to trust it), in words."""
    lines = []
    if facts.emulated:
        lines.append(
            (
                "Emulated",
                f"Every time on this page is the virtual clock of the emulated fabric {facts.emulated}. It shows "
                "that the loop works; it is no statement about NCCL's performance on any real machine.",
            )
        )
    explanation = facts.before_after.explanation
    lines.append(("Comparison", f"{explanation[0].upper()}{explanation[1:]}."))
    if facts.before_after.remedy:
        lines.append(("A better comparison", f"{facts.before_after.remedy}."))
    for run in (facts.before, facts.after):
        if run is not None and run.n_disagreements is not None:
            lines.append((f"Agreement, {run.label}", f"{run.n_disagreements} calls on which ranks disagreed."))
    losses = [[step.loss_hex for step in run.steps if step.loss_hex] for run in (facts.before, facts.after) if run]
    if len(losses) == 2 and all(losses):
        compared = "identical to the last bit" if losses[0] == losses[1] else "DIFFERENT"
        lines.append(("Loss", f"Loss curves {compared} over the compared runs."))
    if words := passed_by(facts.job.passages):
        lines.append(("Passed the tuner by", f"{words[0].upper()}{words[1:]}."))
    if words := beside(facts.job.passages):
        lines.append(("Beside ours", f"{words[0].upper()}{words[1:]}."))
    lines += [("Left out", f"{words}.") for words in mistimed(facts.job.passages)]
    found = [*late(facts.job.lateness), *was_late(facts.job.lateness)]
    lines += [("Late ranks", f"{words[0].upper()}{words[1:]}.") for words in found]
    lines += [("Of the whole job", f"{news}.") for news in news_of(facts.decisions)]
    measured = facts.measurements
    if len(measured):
        n_outliers = int(np.count_nonzero(measured["outcome"] == Outcome.outlier))
        lines.append(("Measurements", f"{len(measured):,} joined over ranks, {n_outliers:,} marked as outliers."))
        sources = {TimingSource(int(one)).name for one in np.unique(measured["timing_source"])}
        lines.append(("Timing", f"Durations from: {', '.join(sorted(sources))}."))
    else:
        lines.append(("Measurements", "None are recorded for this job."))
    return lines
