"""Prints `zerotune explain`, for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ....store.counted import counted
from ....store.records import Stage
from ....store.records.job_names import titled
from ....store.records.passages import Passages
from ...client.late import late, was_late
from ...client.misaligned import to_be_padded
from ...client.mistimed import mistimed
from ...client.status import workload
from ...learning.policy.overrides import Override
from ..jobs.listing import Gain, GainKind
from ..jobs.listing_shown import unknown_gain
from ..size_ranges import exact_range
from .keys import in_one_line, when
from .values import Explanation, Head

MAX_UNSEEN: Final = 4
WIDE: Final = 110
"""Columns of a terminal on which a key's figures fit on one line."""
BEYOND_CALLS: Final = (
    "What whole steps save beyond that is computation: channels hold multiprocessors of the GPU, and fewer channels"
    " leave it more of them."
)
MEANINGS: Final = (
    "baseline: NCCL's own choice. expected: estimated from the predictions and from what this job had measured until"
    " the key's last decision; guessed: from the predictions alone. In a reason, predicted is what was expected before"
    " that trial. What is predicted to be slower goes on trial where its interval leaves enough to be gained. Medians"
    " are of all calls that the store has now. A percentage in a reason compares steps that ran in turns, so the two"
    " may differ."
)


def render(
    explanations: Sequence[Explanation], console: Console, head: Head | None, *, shows_all: bool = True
) -> None:
    """Print each key's saving, then the reasons for its setting, in the given order.

    Unless `shows_all`, quiet keys (`Explanation.is_quiet`) and single decisions are left out, and only counted.
    """
    if head is not None:
        console.print(describe(head), markup=False, highlight=False, soft_wrap=True)
    if not explanations:
        console.print("Nothing was decided in this job, and no training of it was measured. --job names another.")
        return
    if head is not None:
        frozen = f", tuning frozen since step {head.frozen_since:,} (--tune-for)" if head.frozen_since else ""
        _indented(console, workload(Stage[head.stage], head.missing_evidence) + frozen)
        if head.in_shadow:
            _indented(console, f"{head.in_shadow}: --all shows where, and why")
        if head.baseline:
            _indented(console, f"NCCL's own choice is that of the tuner {head.baseline}, which is asked before ours")
        for words in (*late(head.lateness), *was_late(head.lateness), *to_be_padded(head.misaligned)):
            _indented(console, words, "yellow")
        for words in (*mistimed(Passages(n_impossible_times=head.n_impossible_times)), *_damaged(head.n_damaged)):
            _indented(console, words, "yellow")
    listed = [one for one in explanations if shows_all or not one.is_quiet]
    gain = None if head is None else head.gain
    _render_savings(listed, [one for one in explanations if one not in listed], gain, console)
    news = explanations[0].job_history
    if not shows_all:
        n_decisions = len(news) + sum(len(one.history) for one in explanations)
        history = f"{counted(n_decisions, 'entry', 'entries')} of history: --all shows each with its evidence"
        _indented(console, f"{history}, --next what would be tried next")
        return
    if news:
        console.print("\n[bold]Of the whole job[/]")
        for line in news:
            _indented(console, line)
    for one in listed:
        _render_one(one, console)
    console.print()
    _indented(console, MEANINGS, "dim")


def _damaged(n: int) -> Iterator[str]:
    if n:
        yield (
            f"{counted(n, 'measurement')} of this job cannot be used, as rows of the store are damaged: they count as"
            " calls, and in no median; `zerotune store check` has more"
        )


def _render_savings(
    listed: Sequence[Explanation], quiet: Sequence[Explanation], gain: Gain | None, console: Console
) -> None:
    """Print each key's share of a step and its saving; quiet keys share one line."""
    if listed:
        line = "\n" if console.width < WIDE else " "  # a cell's two parts are stacked if there is no room
        headings = (f"collective,{line}phase", "bytes", f"calls{line}per step", f"share{line}of step")
        to = f" to{line}"
        padding = (0, 2 if line == " " else 1, 0, 0)
        table = Table(*headings, f"saved{line}per step", "setting", box=None, padding=padding)
        for column in (table.columns[0], table.columns[-1]):
            column.no_wrap = True
        for one in listed:
            table.add_row(
                f"{one.collective}{line}{one.phase}",
                exact_range(one.min_bytes, one.max_bytes).replace(" to ", to),
                _figure(one.calls_per_step, "{:,.1f}"),
                _figure(one.step_percent, "{:.1f} %"),
                _saved(one.saved_us, one.saved_percent).replace(" (", f"{line}("),
                one.setting,
            )
        console.print(table)
        known = [one for one in listed if one.saved_us is not None]
        if known:
            us = sum(one.saved_us or 0.0 for one in known)
            percent = sum(one.saved_percent or 0.0 for one in known)
            _indented(console, f"all together: {_saved(us, percent)} saved per step, hidden communication included")
            if gain is not None and gain.saved_us is not None:
                is_noise = gain.kind is GainKind.within_noise
                words = "nothing beyond noise" if is_noise else _saved(gain.saved_us, gain.saved_percent)
                _indented(console, f"whole steps: {words}, against NCCL's own choice beside them")
                if not is_noise and us > 0 and (gain.low_percent or 0.0) > percent:
                    _indented(console, BEYOND_CALLS)
            elif gain is not None and gain.kind is GainKind.unknown:
                _indented(console, f"whole steps: {unknown_gain(gain)}")
    if quiet:
        percent = sum(one.step_percent or 0.0 for one in quiet)
        rows = "1 row more{} runs" if len(quiet) == 1 else f"{len(quiet):,} rows more{{}} run"
        share = f" ({percent:.1f} % of step time)" if percent else ""
        n_tried = sum(1 for one in quiet if one.n_explored or (one.on_trial and not one.is_trial_to_come))
        tried = f", others were tried on {n_tried} of them" if n_tried else ""
        _indented(console, f"{rows.format(share)} NCCL's own choice{tried}: --all shows them")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _saved(us: float | None, percent: float | None) -> str:
    return "-" if us is None else f"{us:+,.0f} us ({percent or 0.0:+.1f} %)"


def describe(head: Head) -> str:
    """The job, its fabric and communicators, and whether it was emulated."""
    fabric = f"fabric {head.fabric_id}" if head.fabric_id else "an unknown fabric"
    emulated = f" (NCCL emulated as {head.emulated}: times are a virtual clock's)" if head.emulated else ""
    ran_on = "; ".join(map(str, head.communicators)) or "nothing measured"
    return f"Job {titled(head.job_id, head.name)} on {fabric}{emulated}: {ran_on}"


def render_none(known: Sequence[Explanation], console: Console, head: Head | None) -> None:
    """Print the job's known keys, if no key fits the request."""
    if not known:
        render(known, console, head)
        return
    if head is not None:
        console.print(describe(head), markup=False, highlight=False, soft_wrap=True)
    console.print("No decision fits what was asked for, so NCCL's own choice runs there. This job has run:")
    sizes: dict[str, list[str]] = {}
    for one in known:
        place = f"{one.key.collective.name} {one.key.phase.name}"
        sizes.setdefault(place, []).append(exact_range(one.min_bytes, one.max_bytes))
    for place, ranges in sizes.items():
        _indented(console, f"{place}: {'; '.join(ranges)} bytes")


def shown(alternatives: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measured candidates, and the best of the others; `--json` has all."""
    unseen = [one for one in alternatives if not one["n_all_jobs"]][:MAX_UNSEEN]
    return [one for one in alternatives if one["n_all_jobs"] or one in unseen]


def noted(one: Mapping[str, Any]) -> str:
    """The time of a candidate's note, in brackets; empty if it is unknown."""
    if not one["note"] or one["noted_epoch"] is None:
        return ""
    at = f"epoch {one['noted_epoch']}" if one["noted_step"] is None else f"step {one['noted_step']}"
    return f" ({at}, before what runs now)" if one["is_past"] else f" ({at})"


def _render_one(explained: Explanation, console: Console) -> None:
    key, decision = explained.key, explained.decision
    sizes = exact_range(explained.min_bytes, explained.max_bytes)
    where = f"\n[bold]{key.collective.name}[/] {key.phase.name}, {sizes} bytes, {key.communicator}:"
    console.print(f"{where} [bold cyan]{explained.setting}[/]", highlight=False)
    if decision is not None:
        _indented(console, f"{decision.kind}, {when(decision)}: {decision.reason}")
        if explained.not_adopted:
            _indented(
                console, f"decided, but not adopted: no step is recorded under a plan with {explained.not_adopted}"
            )
    elif not explained.on_trial:
        since = " since another daemon took over" if explained.decided_at_s is not None else " yet"
        _indented(console, f"nothing has been decided here{since}")
    if explained.on_trial:
        unjudged = "" if decision is not None else "; there is no verdict of it, nor of another setting"
        to_come = ", but no step is recorded under a plan with it" if explained.is_trial_to_come else ""
        _indented(console, f"the last decision put {explained.on_trial} on trial{to_come}{unjudged}")
    _indented(console, f"runs as {explained.runs_as}: {Override[explained.runs_as].words}")
    guesses = f"model {explained.model_id}" if explained.model_id else "NCCL's cost, no model yet"
    n_tried = explained.n_explored
    tried = "no candidate had a trial of its own here" if decision is not None else ""
    if n_tried:
        tried = f"{n_tried} candidate{'s were' if n_tried > 1 else ' was'} on trial here"
    if explained.spent_us:
        tried += (
            f", which cost {explained.spent_us:,.0f} us" if n_tried else f"; turns cost {explained.spent_us:,.0f} us"
        )
    _indented(console, "; ".join(filter(None, (f"predictions by {guesses}", tried))))
    # Notes stand below the figures, as both do not fit side by side on 80 columns.
    expected = "guessed" if explained.is_guess else "expected"
    headings = f"{expected} us (90 %)", "this job, us\n(all calls)", "all jobs, us\n(all calls)"
    table = Table("  setting", *headings, box=None)
    for column in table.columns[:2]:
        column.no_wrap = True
    for one in shown(explained.alternatives):
        table.add_row(
            f"  {one['candidate']}",
            _interval(one),
            _median(one["job_median_us"], one["n_this_job"]),
            _median(one["median_us"], one["n_all_jobs"]),
        )
    console.print(table)
    for one in shown(explained.alternatives):
        if one["note"]:
            _indented(console, f"{one['candidate']}: {one['note']}{noted(one)}")
    own_line = None if decision is None else in_one_line(decision)
    is_later = False
    for line in explained.history:
        if line == own_line:
            is_later = True
        else:
            _indented(console, f"{'later' if is_later else 'earlier'}: {line}", style="dim")


def _indented(console: Console, words: str, style: str = "") -> None:
    """A line with a hanging indent; it is not wrapped if the output is no terminal."""
    width = console.width if console.is_terminal else 10**6
    lines = textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    console.print("\n".join(lines), style=style, markup=False, highlight=False, soft_wrap=True)


def _interval(one: dict[str, Any]) -> str:
    if one["predicted_us"] is None:
        return "-"
    return f"{one['predicted_us']:,.1f} ({one['predicted_low_us']:,.1f}..{one['predicted_high_us']:,.1f})"


def _median(us: float | None, n_calls: int) -> str:
    return "-" if us is None else f"{us:,.1f} ({n_calls:,})"
