"""`zerotune plot`."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Annotated

import typer

from ....store.errors import UserError
from .. import completion
from ..options import AsJson, JobOfStore, StorePath
from ..paths import output_file, store_path
from .report import A_TRACE, Summaries, Traces

NAMES = ("steps", "exposed", "timeline", "ranks", "winners", "regret", "memory")
_OF_TRACES = ("timeline", "ranks")


def plot(
    name: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(NAMES)}; `list` says which of them this job has.",
            autocompletion=completion.one_of(*NAMES, "list"),
        ),
    ],
    out: Annotated[Path, typer.Argument(help="A .png or .svg file.")] = Path("plot.png"),
    store: StorePath = None,
    job: JobOfStore = None,
    trace: Traces = None,
    summary: Summaries = None,
    as_json: AsJson = False,
) -> None:
    """Write one picture of the report as PNG or SVG.

    Example: zerotune plot winners winners.svg
    """
    import json

    from ...offline.plots import save
    from ...offline.report.facts import TRAIN_FIRST, gather, untrained
    from ...offline.report.pictures import pictures

    facts = gather(store_path(store), job, summary or (), trace or ())
    drawn, missing = pictures(facts)
    found = {picture.name: picture for picture in drawn}
    if name == "list":
        print(json.dumps(list(found)) if as_json else "\n".join(_line(one, found) for one in NAMES))
    elif name in found:
        save(found[name].figure, output_file(out))
        print(json.dumps({"picture": str(out)}) if as_json else out)
    elif name in _OF_TRACES:
        what = "timeline" if name == "timeline" else "picture of the ranks"
        raise UserError(f"there is no {what}: {missing[name]}" if trace else f"the {what} needs a trace", A_TRACE)
    elif name in NAMES:
        if not facts.is_of_training:
            raise untrained(facts)
        remedy = f"use one of {', '.join(found)}" if found else TRAIN_FIRST
        raise UserError(f"this job has nothing for the picture {name!r}", remedy)
    else:
        raise UserError(f"there is no picture {name!r}", f"use one of {', '.join(NAMES)}")


def _line(name: str, found: Container[str]) -> str:
    if name in found:
        return name
    reason = "needs a folder of `launch --log-trace`: --trace" if name in _OF_TRACES else "nothing recorded in this job"
    return f"{name}  ({reason})"
