"""`zerotune doctor`."""

from __future__ import annotations

import os

import typer

from ..options import AsJson, CurveKeys, Endpoint, StorePath, console, print_json
from ..paths import endpoint_or_default, store_path


def doctor(
    endpoint: Endpoint = None,
    store: StorePath = None,
    curve_keys: CurveKeys = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: what would keep jobs from being tuned, and what to do about it.

    Exit code 1 where something would stop tuning, else 0.

    Example: zerotune doctor
    """
    from ...doctor.examination import examine, worst
    from ...doctor.findings import Machine, Status

    machine = Machine(endpoint_or_default(endpoint), store_path(store), curve_keys, dict(os.environ))
    findings = examine(machine)
    status = worst(findings)
    if as_json:
        print_json({"status": status, "checks": findings})
    else:
        from ...doctor.shown import render

        render(findings, console())
    if status is Status.problem:
        raise typer.Exit(1)
