"""`zerotune explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....store.errors import UserError
from .. import completion
from ..offline.import_ import FormatName
from ..options import AsJson, JobOfStore, StorePath, console, print_json
from ..paths import store_path
from ..sizes import a_size


def explain(
    store: StorePath = None,
    job: JobOfStore = None,
    collective: Annotated[
        str | None,
        typer.Option(help=f"Only this collective: {completion.COLLECTIVES}.", autocompletion=completion.collectives),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(
            help="Only this phase: forward_gather, backward_gather, gradient_scatter, post_step_gather or other.",
            autocompletion=completion.phases,
        ),
    ] = None,
    message_bytes: Annotated[
        int | None,
        typer.Option(help="Only the size class of this size: 1048576, 1MiB, 1e6.", parser=a_size, metavar="SIZE"),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Show the kind of training of a trace, a file or a folder; repeat it."),
    ] = None,
    format_name: FormatName = None,
    rank: Annotated[
        int | None, typer.Option(help="With --trace: the rank whose sequence is read; default: the first one in it.")
    ] = None,
    next_: Annotated[
        bool, typer.Option("--next", help="Show what would be tried next, and its expected gain.")
    ] = False,
    environment: Annotated[
        bool, typer.Option("--environment", help="Show what `launch --tune-environment` tried, and the results.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show every key, and every decision with its evidence.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what each setting saves; for all or some keys also its evidence, prediction and alternatives.

    Example: zerotune explain

    Why: zerotune explain --collective all_gather --message-bytes 1MiB

    What kind of training: zerotune explain --trace traces/
    """
    of_a_trace = {"--format": format_name, "--rank": rank}
    of_a_store = {"--collective": collective, "--phase": phase, "--message-bytes": message_bytes}
    of_a_store |= {"--next": next_ or None, "--all": every or None}
    if environment:
        for option, value in (of_a_trace | of_a_store | {"--trace": trace}).items():
            if value is not None:
                raise UserError(f"{option} is useless with --environment", "leave it out")
        from ...environment import shown

        found = shown.known(store_path(store), job)
        print_json(shown.document(found)) if as_json else shown.render(found, console())
        return
    for option, value in (of_a_store if trace is not None else of_a_trace).items():
        if value is not None:
            other = "with --trace" if trace is not None else "without --trace"
            raise UserError(f"{option} is useless {other}", "leave it out")
    if trace is not None:
        from . import stage_shown

        stage_shown.show(trace, store_path(None), rank, job, format_name, as_json=as_json)
        return
    from ...offline import explaining
    from ...offline.explaining import words

    path = store_path(store)
    explained = explaining.explain(path, job, collective, phase, message_bytes)
    if next_:
        from ...offline.explaining.next_trials import next_trials, render_next

        trials = next_trials(explained)
        print_json(trials) if as_json else render_next(trials, console())
        return
    if as_json:
        print_json(explained)
        return
    head = explained[0].job if explained else explaining.head_of(path, job)
    is_filtered = any((collective, phase, message_bytes))
    if not explained and is_filtered:
        words.render_none(explaining.explain(path, job, None, None, None), console(), head)
        return
    words.render(explained, console(), head, shows_all=every or is_filtered)
