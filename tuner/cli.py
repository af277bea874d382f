"""The `zerotune` command: each subcommand parses, calls one function of its part, and renders.

Everything heavy is imported inside the commands, so that `zerotune --help` answers at once.
Exit codes: 0 done, 2 a mistake of the user's (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from store.errors import UserError, ZerotuneError

app = typer.Typer(
    name="zerotune",
    help="Online autotuning of NCCL collectives for ZeRO and FSDP training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Endpoint = Annotated[
    str | None,
    typer.Option(
        help="ZeroMQ endpoint of the daemon; default: ipc:// below the runtime directory.",
        envvar="ZEROTUNE_ENDPOINT",
    ),
]
StorePath = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="The store's SQLite file; default: below the XDG data directory.",
        envvar="ZEROTUNE_STORE",
    ),
]
FabricName = Annotated[
    str | None,
    typer.Option(
        "--fabric", help="Name or path of a fabric file: use the emulated NCCL. See `zerotune fabrics`."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def main() -> None:
    """Entry point of the console script."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        print(f"zerotune: {error}", file=sys.stderr)
        sys.exit(2)
    except ZerotuneError as error:
        print(f"zerotune: {error}", file=sys.stderr)
        sys.exit(1)
    except sqlite3.DatabaseError as error:
        reason = " ".join(str(error).split())
        print(f"zerotune: the store is damaged ({reason}); start `zerotune daemon` once: it keeps the damaged "
              "file under another name and begins a new one", file=sys.stderr)  # fmt: skip
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _output_file(path: Path) -> Path:
    if not path.name or path.is_dir():
        raise UserError(f"cannot write to {str(path)!r}: it is a folder", "name a file")
    return path


def _store_path(path: Path | None) -> Path:
    from store.paths import default_store_path

    return path or default_store_path()


def _endpoint(endpoint: str | None) -> str:
    from store.paths import default_endpoint

    return endpoint or default_endpoint()


def _console() -> Any:
    from rich.console import Console

    # Into a pipe or a file, rich would cut tables to 80 columns.
    return Console() if sys.stdout.isatty() else Console(width=160)


@app.command()
def launch(
    command: Annotated[list[str], typer.Argument(help="The training command, after `--`.")],
    fabric: FabricName = None,
    endpoint: Endpoint = None,
    start_daemon: Annotated[bool, typer.Option(help="Start a daemon for this job if none answers.")] = False,
    store: StorePath = None,
    log_trace: Annotated[
        Path | None, typer.Option(help="Log every collective into this folder, for `zerotune replay`.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Run under this plan file, with no daemon at all.")
    ] = None,
    summary: Annotated[Path | None, typer.Option(help="Write step times to this JSON file.")] = None,
    agent: Annotated[bool, typer.Option(help="--no-agent runs the emulated fabric untuned.")] = True,
) -> None:
    """Run an unmodified training command with its collectives tuned.

    Example: zerotune launch -- torchrun --nproc-per-node 8 train.py --epochs 3

    Without a GPU: zerotune launch --fabric ethernet_boxes -- torchrun --nproc-per-node 2 train.py
    """
    from agent import launch as launching
    from tuner.status import fetch_status

    request = launching.LaunchRequest(
        command, fabric, endpoint, agent, trace_dir=log_trace, summary_path=summary, plan_path=plan
    )
    where = launching.endpoint(request)
    answers = False
    if agent and plan is None:
        answers = fetch_status(where, timeout_s=0.5) is not None
        if not answers and start_daemon:
            from tuner.background import start_in_background

            start_in_background(where, _store_path(store))
            answers = True
    problems = launching.check(request, daemon_answers=answers)
    launching.refuse_fatal(problems)
    for problem in problems:
        print(f"zerotune: {problem}", file=sys.stderr)
    for folder in filter(None, (log_trace, summary.parent if summary else None)):
        launching.make_writable(folder)
    sys.stdout.flush()
    os.execvpe(command[0], command, launching.environment(request))


@app.command()
def fabrics(as_json: AsJson = False) -> None:
    """List the fabrics of the emulated NCCL.

    Example: zerotune fabrics
    """
    import json

    from agent.nccl import fabric

    described = {name: fabric.load(name).describe() for name in fabric.names()}
    if as_json:
        print(json.dumps(described, indent=2))
        return
    from rich.table import Table

    table = Table("fabric", "what it is", title="Fabrics of the emulated NCCL (launch --fabric NAME)")
    for name, description in described.items():
        table.add_row(name, str(description.get("summary", "")))
    _console().print(table)


@app.command()
def daemon(
    endpoint: Endpoint = None,
    store: StorePath = None,
    idle_exit: Annotated[
        float | None, typer.Option(help="Leave after this many seconds without a rank; default: never.")
    ] = None,
    curve_keys: Annotated[
        Path | None, typer.Option(help="Folder with CURVE keys; required for a tcp:// endpoint.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each decision.")] = False,
) -> None:
    """Run the tuner daemon of this node in the foreground; SIGTERM ends it in good order.

    Example: zerotune daemon --store /var/lib/zerotune/store.db
    """
    import logging

    from tuner.daemon import run_daemon

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    raise typer.Exit(
        run_daemon(_endpoint(endpoint), _store_path(store), idle_exit_s=idle_exit, curve_dir=curve_keys)
    )


@app.command()
def status(endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Show the daemon's jobs, ranks, rates, epochs, last decisions and health.

    Example: zerotune status
    """
    from tuner.status import fetch_status

    where = _endpoint(endpoint)
    reply = fetch_status(where, timeout_s=2.0)
    if reply is None:
        raise UserError(f"no daemon answers at {where}", "start one with `zerotune daemon`")
    if as_json:
        import msgspec

        print(msgspec.json.encode(reply).decode())
        return
    from tuner.status import render_status

    render_status(reply, _console())


@app.command()
def explain(
    store: StorePath = None,
    job: Annotated[str | None, typer.Option(help="Job id; default: the newest job.")] = None,
    collective: Annotated[str | None, typer.Option(help="Only this collective, e.g. all_gather.")] = None,
    phase: Annotated[str | None, typer.Option(help="Only this phase, e.g. forward_gather.")] = None,
    message_bytes: Annotated[int | None, typer.Option(help="Only the size class of this size.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say why each setting is what it is: evidence, prediction, alternatives.

    Example: zerotune explain --collective all_gather --message-bytes 1048576
    """
    from tuner import explanations

    explained = explanations.explain(_store_path(store), job, collective, phase, message_bytes)
    if as_json:
        import msgspec

        print(msgspec.json.encode(explained).decode())
        return
    explanations.render(explained, _console())


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Argument(help="A trace folder of `launch --log-trace`, or another format's file.")
    ],
    policy: Annotated[
        list[str], typer.Option(help="baseline, table, model or oracle; may be given several times.")
    ] = ["baseline", "table", "model", "oracle"],  # noqa: B006 - typer reads the default, nobody changes it
    plan: Annotated[
        Path | None, typer.Option(help="What policy `table` follows: our plan file or NVIDIA's tuner CSV.")
    ] = None,
    store: StorePath = None,
    fabric: FabricName = None,
    as_json: AsJson = False,
) -> None:
    """Judge policies on a recorded trace: what would each have cost, and from which evidence.

    Example: zerotune replay traces/ --policy baseline --policy model
    """
    from tuner import replay as replaying

    result = replaying.replay(trace, policy, _store_path(store), fabric, plan)
    if as_json:
        print(result.to_json())
        return
    replaying.render(result, _console())


@app.command()
def sweep(
    fabric: FabricName = None,
    store: StorePath = None,
    n_ranks: Annotated[int, typer.Option(help="Ranks to start on this machine.")] = 2,
    collective: Annotated[
        list[str], typer.Option(help="Collectives to measure; may be given several times.")
    ] = ["all_gather", "reduce_scatter"],  # noqa: B006 - as above
    min_bytes: Annotated[int, typer.Option(help="Smallest message, total bytes.")] = 4096,
    max_bytes: Annotated[int, typer.Option(help="Largest message, total bytes.")] = 64 * 2**20,
    full: Annotated[bool, typer.Option("--full", help="Measure the whole grid.")] = False,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Measure nothing: compare two sweeps, by job id or fabric id.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure settings x sizes x collectives in one process group and record them.

    Ctrl-C keeps what was measured; the same command goes on from there.

    Example: zerotune sweep --fabric ethernet_boxes --max-bytes 1048576
    """
    from tuner import sweep as sweeping

    if compare is not None:
        from tuner.sweep.compare import compare as compare_sweeps
        from tuner.sweep.compare import render_comparison

        render_comparison(compare_sweeps(_store_path(store), *compare), _console())
        return
    result = sweeping.sweep(
        sweeping.SweepRequest(
            fabric=fabric,
            n_ranks=n_ranks,
            collectives=tuple(collective),
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            full=full,
        ),
        _store_path(store),
        _console(),
    )
    if as_json:
        print(result.to_json())
        return
    sweeping.render(result, _console())


@app.command(name="import")
def import_(
    path: Annotated[Path, typer.Argument(help="A file, or a folder with one file per rank.")],
    store: StorePath = None,
    fabric_id: Annotated[
        str | None, typer.Option(help="Hardware it was measured on; default: the folder's name.")
    ] = None,
    setting: Annotated[
        str | None, typer.Option(help="What ran, where the file does not say: e.g. ring/ll128 or ring/ll128/8.")
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="The file shows NCCL's own choices.")] = False,
    n_nodes: Annotated[int | None, typer.Option(help="Nodes, where the file does not say.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what was found and could be used.")] = False,
) -> None:
    """Import measurements of nccl-tests, NVIDIA's tuner CSV and other formats (docs/traces.md).

    Example: zerotune import all_gather.log --default --n-nodes 2 --fabric-id my-cluster
    """
    from tuner import importing

    trace, n_rows = importing.import_measurements(
        path,
        _store_path(store),
        fabric_id=fabric_id,
        setting=importing.parse_setting(setting) if setting else None,
        is_default=default,
        n_nodes=n_nodes,
        dry_run=dry_run,
    )
    importing.render(trace, n_rows, _console(), dry_run=dry_run)


@app.command()
def memory(
    model: Annotated[str | None, typer.Option(help="Number of parameters, e.g. 7.5B.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks that share the model.")] = 64,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adam, sgd, momentum, ...")] = "adam",
    overlap: Annotated[bool, typer.Option("--overlap", help="Show where gathers stop hiding, by ranks.")] = False,
    layer_mib: Annotated[float, typer.Option(help="With --overlap: size of one layer.")] = 400.0,
    compute_us: Annotated[float, typer.Option(help="With --overlap: compute per layer.")] = 9000.0,
) -> None:
    """Memory and communication that each ZeRO stage needs; without --model the paper's tables.

    Example: zerotune memory --model 7.5B --ranks 64
    """
    from tuner import memory_report

    console = _console()
    if overlap:
        memory_report.render_overlap(layer_mib * 2**20, compute_us, console)
    elif model is None:
        memory_report.render_paper_tables(console)
    else:
        memory_report.render_model(model, ranks, precision, optimizer, console)


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    to: Annotated[
        str, typer.Option("--to", help="plan (for launch --plan), nvidia-csv, or measurements (CSV).")
    ] = "plan",
    store: StorePath = None,
    job: Annotated[str | None, typer.Option(help="Job id; default: the newest job with decisions.")] = None,
) -> None:
    """Take what was learned elsewhere: a plan file, NVIDIA's example-tuner CSV, or all measurements.

    Example: zerotune export plan.json && zerotune launch --plan plan.json -- torchrun train.py
    """
    from tuner import export as exporting

    path, out = _store_path(store), _output_file(out)
    if to == "plan":
        remarks = exporting.export_plan(path, out, job)
    elif to == "nvidia-csv":
        remarks = exporting.export_nvidia_csv(path, out, job)
    elif to == "measurements":
        remarks = exporting.export_measurements(path, out)
    else:
        raise UserError(f"cannot export to {to!r}", "use plan, nvidia-csv or measurements")
    for remark in remarks:
        print(remark)


@app.command()
def report(
    out: Annotated[Path, typer.Argument(help="HTML file to write.")] = Path("report.html"),
    store: StorePath = None,
    job: Annotated[str | None, typer.Option(help="Job id; default: the newest job.")] = None,
) -> None:
    """Write one self-contained HTML page about a job.

    Example: zerotune report report.html
    """
    from tuner.report import write_report

    print(write_report(_store_path(store), _output_file(out), job_id=job))


@app.command()
def plot(
    name: Annotated[str, typer.Argument(help="steps, exposed, winners, regret, memory, ...; `list` shows them.")],
    out: Annotated[Path, typer.Argument(help="A .png or .svg file.")] = Path("plot.png"),
    store: StorePath = None,
    job: Annotated[str | None, typer.Option(help="Job id; default: the newest job.")] = None,
) -> None:
    """Write one picture of the report as PNG or SVG.

    Example: zerotune plot winners winners.svg
    """
    from tuner.plots import save
    from tuner.report.facts import gather
    from tuner.report.page import pictures

    found = {picture.name: picture for picture in pictures(gather(_store_path(store), job))}
    if name == "list":
        print("\n".join(found))
    elif name in found:
        save(found[name].figure, _output_file(out))
        print(out)
    else:
        raise UserError(f"there is no picture {name!r} of this job", f"use one of {', '.join(found) or 'none'}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, the store and the logs.")] = Path("run"),
    fabric: FabricName = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of each run.")] = None,
) -> None:
    """Show the whole loop on this machine without a GPU (what `make run` does).

    Example: zerotune demo --out run
    """
    from tuner import demo as demonstration

    demonstration.demo(
        out, _console(), fabric=fabric or demonstration.FABRIC, n_steps=steps or demonstration.N_STEPS
    )


if __name__ == "__main__":
    main()
