"""Prints replay's result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from ....store.counted import counted
from ....store.records import CommunicatorClass
from ..emulated_note import emulated_note
from .policies import POLICIES
from .result import OracleFacts, PolicyTotal, ReplayResult, ShapeVerdict, StepEstimate, StepRefusal, WhatIf
from .steps import OVERLAP

MAX_ROWS = 30
_EVIDENCE = {
    "measured_here": "measured here",
    "measured_elsewhere": "measured elsewhere",
    "predicted": "predicted",
    "none": "[red]none[/]",
}


def render(result: ReplayResult, console: Console, *, max_rows: int = MAX_ROWS) -> None:
    """Print what was replayed, each policy by (collective, phase, size), and the totals."""
    missing = (
        (result.n_left_out, result.left_out_percent, "that ran and cannot be judged"),
        (result.n_dropped, result.dropped_percent, "lost before they were logged"),
    )
    without = ", ".join(f"{n:,} ({percent:.1f} %) {why}" for n, percent, why in missing if n)
    console.print(
        f"[bold]{result.trace}[/]: {counted(result.n_collectives, 'collective')}, {result.n_timed:,} of them timed,"
        f" in {counted(result.n_steps, 'step')} of {counted(result.n_files, 'file')};"
        f" {result.logged_us / 1e3:,.1f} ms as logged"
        + (f"; [yellow]without {without}[/]" if without else "")
    )
    if result.emulated:
        console.print(emulated_note(result.emulated))
    for note in result.notes:  # before the figures, which need these notes
        console.print(f"[yellow]{note}[/]")
    _render_shapes(result, console, max_rows)
    table = Table(
        "policy", "cost (95 %)", "change of time (95 %)", "judged by", "refused", title="Totals of communication time"
    )
    for total in result.totals:
        table.add_row(*_total_row(total))
    console.print(table)
    for total in result.totals:
        meaning = (POLICIES[total.policy].__doc__ or "").partition("\n")[0]
        console.print(f"[dim]{total.policy}: {meaning}[/]")
    for words in oracle_text(result.oracle):
        console.print(f"[yellow]{words}[/]")
    _render_steps(result, console)
    if result.what_if is not None:
        _render_what_if(result.what_if, console)


def oracle_text(facts: OracleFacts | None) -> Iterator[str]:
    """Why the oracle saves less than expected; empty if it does not."""
    if facts is None:
        return
    for one in facts.cheaper:
        n_predicted = one.n_by_evidence.get("predicted", 0)
        why = (
            f"{n_predicted:,} of them are only predicted, and the oracle counts a prediction by the high end of its"
            " interval. A sweep, or a run with these settings, measures them"
            if n_predicted
            else "what it mixes, or what another job measured, is carried over as a ratio to NCCL's own choice"
        )
        yield (
            f"The oracle is not the least here: {one.policy} is {one.below_percent:.1f} % below it, by"
            f" {one.n_collectives:,} calls. {why}."
        )
    if facts.n_refused:
        yield (
            f"The oracle says nothing of {facts.n_refused:,} of {facts.n_collectives:,} calls: not even NCCL's own"
            " choice was measured or can be predicted there."
        )
    if facts.n_alone:
        yield (
            f"The oracle can only leave {facts.n_alone:,} of {facts.n_collectives:,} calls to NCCL: no other setting"
            " was measured there, by this job or by another one, and no prediction is surely faster."
        )


def _render_steps(result: ReplayResult, console: Console) -> None:
    facts = result.steps
    if facts is None:
        return
    table = Table("policy", "step", "exposed", "change of time (95 %)", title=f"Step time, {facts.method}")
    _step_rows(table, result.step_estimates, result.step_refusals)
    table.add_row(
        "[dim]as logged[/]", f"[dim]{facts.step_us / 1e3:,.2f} ms[/]", f"[dim]{facts.exposed_us / 1e3:,.2f} ms[/]", ""
    )
    console.print(table)
    if facts.method == OVERLAP:
        console.print(
            f"[dim]{facts.n_steps:,} of {result.n_steps:,} steps have like calls; `as logged` and the program are the"
            " last consecutive ones'. Compute gaps are kept; the program misses logged steps by"
            f" {facts.model_error_percent:.2f} %. Taken to be waited for:[/]"
        )
        for kind, rule in facts.waits.items():
            console.print(f"[dim]  {kind}: {rule}[/]")
    else:
        console.print(
            f"[dim]Overlap is not modelled: {facts.reason}. The exposed share of communication,"
            f" {100 * facts.exposed_share:.0f} %, is taken to stay; bounds: all of the change hidden, all exposed.[/]"
        )


def _step_rows(table: Table, estimates: Sequence[StepEstimate], refusals: Sequence[StepRefusal]) -> None:
    for one in estimates:
        table.add_row(
            one.policy,
            f"{one.step_us / 1e3:,.2f} ms ({one.low_us / 1e3:,.2f}..{one.high_us / 1e3:,.2f})",
            f"{one.exposed_us / 1e3:,.2f} ms",
            f"{one.change_percent:+.2f} % ({one.change_low_percent:+.2f}..{one.change_high_percent:+.2f})",
        )
    for refusal in refusals:
        refused = f"[red]refused: no evidence for {refusal.refused_share_percent:.1f} % of its communication[/]"
        table.add_row(refusal.policy, "-", "-", refused)


def _render_what_if(answer: WhatIf, console: Console) -> None:
    table = Table("policy", "step", "exposed", "change of time (95 %)", title=f"What if: {answer.change}")
    _step_rows(table, answer.step_estimates, answer.step_refusals)
    table.add_row("[dim]as logged[/]", f"[dim]{answer.logged_step_us / 1e3:,.2f} ms[/]", "", "")
    console.print(table)
    by_evidence = answer.totals[0].n_by_evidence if answer.totals else {}
    parts = [f"{_EVIDENCE[name]}: {count:,}" for name, count in by_evidence.items() if count]
    console.print(
        f"[dim]{answer.n_collectives:,} collectives a step, {answer.communication_bytes / 1e6:,.1f} MB in all"
        f" ({', '.join(parts) or 'none judged'}). Assumed: {'; '.join(answer.assumptions)}.[/]"
    )


def _render_shapes(result: ReplayResult, console: Console, max_rows: int) -> None:
    judged = [one for one in result.verdicts if one.policy != "baseline"] or list(result.verdicts)
    by_weight = sorted(judged, key=lambda one: -(one.baseline_us or 0.0) * one.n_collectives)
    shown = sorted(by_weight[:max_rows], key=_place)
    table = Table("where", "calls", "baseline", "policy", "setting", "cost (95 %)", "evidence")
    before = None
    has_several = len({(one.n_ranks, one.n_nodes) for one in result.verdicts}) > 1
    for one in shown:
        place = _place(one)[:5]
        where = f"{one.collective} {one.phase} {one.message_bytes:,}"
        if has_several:
            where += f", {CommunicatorClass(one.n_ranks, one.n_nodes)}"
        head = ("", "", "") if place == before else (where, f"{one.n_collectives:,}", _us(one.baseline_us))
        before = place
        table.add_row(*head, one.policy, one.setting, _with_interval(one), _evidence(one))
    console.print(table)
    if len(judged) > max_rows:
        console.print(f"[dim]the {max_rows} rows of most time; {len(judged) - max_rows} more with --json[/]")


def _place(one: ShapeVerdict) -> tuple[str, str, int, int, int, str]:
    return one.collective, one.phase, one.n_ranks, one.n_nodes, one.message_bytes, one.policy


def _evidence(one: ShapeVerdict) -> str:
    samples = f" ({one.n_samples})" if one.n_samples else ""
    return _EVIDENCE[one.evidence] + samples


def _with_interval(one: ShapeVerdict) -> str:
    if one.cost_us is None or one.low_us is None or one.high_us is None:
        return "-"
    return f"{_us(one.cost_us)} ({one.low_us:,.0f}..{one.high_us:,.0f})"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} us"


def _total_row(total: PolicyTotal) -> tuple[str, ...]:
    if total.n_judged == 0:
        nothing = f"[red]all {total.n_refused:,} calls[/]" if total.n_refused else "none"
        return (total.policy, "-", "-", "nothing", nothing)
    parts = [f"{_EVIDENCE[name]}: {count:,}" for name, count in total.n_by_evidence.items() if count]
    refused = "none"
    if total.n_refused:
        refused = f"[red]{total.n_refused:,} calls, {total.refused_share_percent:.1f} % of the time[/]"
    # The change of time, as in all tables for people: below zero is faster.
    gains = total.gain_percent, total.gain_high_percent, total.gain_low_percent
    change, low, high = (0.0 - gain for gain in gains)
    return (
        total.policy,
        f"{total.cost_us / 1e3:,.2f} ms ({total.low_us / 1e3:,.2f}..{total.high_us / 1e3:,.2f})",
        f"{change:+.2f} % ({low:+.2f}..{high:+.2f})",
        "\n".join(parts),
        refused,
    )
