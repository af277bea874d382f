"""`zerotune doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....store.errors import UserError
from ..options import AsJson, CurveKeys, Endpoint, StorePath, console, print_json
from ..paths import endpoint_or_default, store_path

if TYPE_CHECKING:
    from ...doctor.findings import Machine


def doctor(
    launcher: Annotated[
        list[str] | None, typer.Argument(help="With --nodes: a command that starts one task on each node, after `--`.")
    ] = None,
    endpoint: Endpoint = None,
    store: StorePath = None,
    curve_keys: CurveKeys = None,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes",
            help="Compare the nodes on which LAUNCHER runs this. With --json and no LAUNCHER: this node's answer.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine: find what would prevent tuning or slow jobs down, with remedies.

    Exit code 1 if something would prevent tuning, else 0.

    Example: zerotune doctor
    """
    from ....store.paths import default_endpoint
    from ...doctor.examination import examine, worst
    from ...doctor.findings import Machine, Status

    if launcher and not nodes:
        raise UserError(f"doctor takes no {launcher[0]!r}", f"compare nodes with `doctor --nodes -- {launcher[0]} ...`")
    where = endpoint_or_default(endpoint) if endpoint else default_endpoint()  # a bad default one is a finding
    machine = Machine(where, store_path(store), curve_keys, dict(os.environ))
    if nodes and not launcher:
        _answer(machine, as_json)
        return
    if launcher:
        from ...doctor.asking import TIME_LIMIT_S, ask
        from ...doctor.comparing import compare

        given = {"--endpoint": endpoint, "--store": store, "--curve-keys": curve_keys}
        findings = compare(ask(launcher, _as_arguments(given), machine.environment, TIME_LIMIT_S))
    else:
        findings = examine(machine)
    status = worst(findings)
    if as_json:
        print_json({"status": status, "checks": findings})
    else:
        from ...doctor.shown import render

        render(findings, console())
    if status is Status.problem:
        raise typer.Exit(1)


def _answer(machine: Machine, as_json: bool) -> None:
    """Print one line for each fact. The exit code is always 0: launchers end all tasks if one fails."""
    if not as_json:
        raise UserError("--nodes names no launcher", "give one, such as `zerotune doctor --nodes -- srun -N 4`")
    from ...doctor.node import facts

    for fact in facts(machine):
        print_json(fact)
        sys.stdout.flush()


def _as_arguments(given: dict[str, str | Path | None]) -> list[str]:
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]
