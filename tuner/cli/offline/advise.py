"""`zerotune advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....store.errors import UserError
from ....store.foreign.regular_file import begin_of
from .. import completion
from ..options import AsJson, JobOfStore, NicGbps, a_number, console, print_json
from ..paths import output_file, store_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...advice.problem import Problem
    from ...offline.advise.measured import Facts

_MACHINE = "dgx_h100"
_RECOMPUTES = ("none", "half", "full")
_FRAMEWORKS = ("fsdp2", "deepspeed", "zero_runtime")


def advise(
    model: Annotated[
        str | None,
        typer.Argument(help="Parameters (7.5B), a Hugging Face config.json, or package.module:callable."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks; with --hidden, instead of MODEL.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads; default: of 128 each.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence.", min=1)] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Words.", min=1)] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            help="A machine or fabric of `zerotune hardware`, or a topology file; default: dgx_h100. With --overlap a"
            " fabric alone; default: h100_ib_16.",
            autocompletion=completion.described,
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of each node; default: all of its GPUs.", min=1)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"Of {completion.GPUS}; default: what the machine usually has.", autocompletion=completion.gpus
        ),
    ] = None,
    nic_gbps: NicGbps = None,
    memory_gb: Annotated[
        float | None, typer.Option("--gpu-memory-gb", help="Memory of a GPU, 10^9 bytes.", callback=a_number)
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option("--peak-tflops", help="Peak of a GPU in 16 bits.", callback=a_number)
    ] = None,
    precision: Annotated[
        str, typer.Option(help="Of the model.", metavar="fp32|bf16|fp16", autocompletion=completion.precisions)
    ] = "bf16",
    optimizer: Annotated[
        str,
        typer.Option(
            help="Of adam, adamw, radam, nadam, adamax, rmsprop, adagrad, momentum and sgd.",
            autocompletion=completion.optimizers,
        ),
    ] = "adam",
    headroom: Annotated[
        float, typer.Option(help="Percent of a GPU's memory to leave free.", min=0, max=90, callback=a_number)
    ] = 8.0,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of all GPUs per step; default: the fastest.", min=1)
    ] = None,
    model_parallel: Annotated[
        list[int] | None, typer.Option(help="Only this many ranks per model; repeat it.", min=1)
    ] = None,
    stage: Annotated[list[int] | None, typer.Option(help="Only this stage, 0 to 3; repeat it.", min=0, max=3)] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this; repeat it.", metavar="|".join(_RECOMPUTES), autocompletion=completion.one_of(*_RECOMPUTES)
        ),
    ] = None,
    no_flash: Annotated[bool, typer.Option("--no-flash", help="Attention is not fused.")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="The model runs under torch.compile.")] = False,
    top: Annotated[int, typer.Option(help="Configurations to show.", min=1)] = 10,
    config: Annotated[
        str | None,
        typer.Option(
            help="Print the best one for this framework.",
            metavar="|".join(_FRAMEWORKS),
            autocompletion=completion.one_of(*_FRAMEWORKS),
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="A store or a trace of a job on such machines, or a fleet's book: it replaces assumptions."),
    ] = None,
    fabric_id: Annotated[
        str | None, typer.Option("--fabric-id", help="For a book with several fabrics: the one to use.")
    ] = None,
    ran: Annotated[
        str | None,
        typer.Option(
            help="That job's configuration, e.g. stage=3,batch=2,recompute=full: use its steps.", metavar="SETTINGS"
        ),
    ] = None,
    job: JobOfStore = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="With --ran, for a running job: report better configurations when found.")
    ] = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Show only each ZeRO stage's memory; without MODEL the ZeRO paper's tables."),
    ] = False,
    ranks: Annotated[int, typer.Option(help="With --memory: ranks that share the model.", min=1)] = 64,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="With --memory: show up to how many ranks computation hides gathers.")
    ] = False,
    layer: Annotated[str, typer.Option(help="With --overlap: parameters of one layer.", metavar="PARAMETERS")] = "50M",
    tokens: Annotated[int, typer.Option(help="With --overlap: tokens per rank and step.", min=1)] = 4096,
    group: Annotated[int, typer.Option(help="With --overlap: ranks per group of hybrid sharding.", min=1)] = 64,
    environment: Annotated[
        bool,
        typer.Option("--environment", help="Show only which of NCCL's variables to try first on the machine of --job."),
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a picture of the best three, .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find ZeRO configurations that fit a cluster, with predicted memory and speed. Nothing runs.

    Example: zerotune advise 7.5B --fabric dgx_h100 --nodes 2

    Only memory and communication: zerotune advise 7.5B --memory --ranks 64
    """
    if environment:
        if model is not None:
            raise UserError(f"--environment does not use the model {model}", "leave one of them out")
        from ...environment import shown as environments

        environments.render_advice(environments.known(store_path(None), job), console())
        return
    if memory:
        from .memory_shown import show, show_overlaps

        if overlap:
            if model is not None:
                raise UserError(f"--overlap does not use the model {model}", "leave one of them out")
            show_overlaps(fabric, layer, tokens, group, as_json=as_json)
        else:
            show(model, ranks, precision, optimizer, as_json=as_json)
        return
    if overlap:
        raise UserError("--overlap is useless without --memory", "add --memory")
    from msgspec import structs

    from ...advice.constants import DEFAULT
    from ...advice.hardware.clusters import cluster
    from ...advice.problem import Problem
    from ...advice.search import STAGES, Wanted, search
    from ...advice.snippets import FRAMEWORKS, snippet
    from ...offline.advise import document, shown

    if config is not None and (as_json or picture is not None):
        raise UserError("--config prints what is to be pasted and nothing else", "leave out --json and --picture")
    if fabric_id is not None and (measured is None or not _is_book(measured)):
        raise UserError("--fabric-id names a fabric of a book", "name the book with --measured, or leave it out")
    if config is not None and config not in FRAMEWORKS:
        raise UserError(f"{config!r} is no framework that is known here", f"name one of {', '.join(FRAMEWORKS)}")
    problem = Problem(
        shape=document.model_shape(model, layers, hidden, heads, sequence, vocabulary),
        cluster=cluster(
            fabric or _MACHINE,
            nodes,
            DEFAULT,
            gpus_per_node=ranks_per_node,
            gpu_name=gpu,
            memory_gb=memory_gb,
            peak_tflops=peak_tflops,
            nic_gbps=nic_gbps,
        ),
        software=document.software(precision, optimizer, flash=not no_flash, compiled=compiled),
        constants=structs.replace(DEFAULT, headroom=headroom / 100),
    )
    sentences: tuple[str, ...] = ()
    if watch:
        if config is not None or picture is not None:
            raise UserError("--watch says what would pay and writes nothing else", "leave out --config and --picture")
        if ran is None:
            raise UserError("--watch compares a running job with what else it could run", "say with --ran what it runs")
        _watch(problem, store_path(measured, "--measured "), job, ran, as_json)
        return
    of_a_job = " and ".join(f"{name} {value}" for name, value in (("--ran", ran), ("--job", job)) if value is not None)
    if measured is None and of_a_job:
        raise UserError(f"{of_a_job} says what was measured", "name a store or a trace with --measured")
    if measured is not None:
        from ...offline.advise import measured as measurements

        if _is_book(measured):
            if of_a_job:
                raise UserError("a book says nothing of single jobs", f"leave out {of_a_job}")
            facts, rows = _facts_and_rows(measured, fabric_id)
            problem, sentences = measurements.of_rows(problem, rows, facts, f"the book {measured.name}")
        else:
            configuration = measurements.parse_ran(ran) if ran is not None else None
            problem, sentences = measurements.measured(problem, measured, job, configuration)
    wanted = Wanted(
        global_batch=batch,
        stages=tuple(stage) if stage else STAGES,
        model_parallel=tuple(model_parallel or ()),
        recompute=document.recomputes(recompute),
    )
    choices = tuple(search(problem, wanted, top if config is None else 1))
    if config is not None:
        best = choices[0].configuration
        print(snippet(config, best, problem.shape, problem.n_groups(best), precision), end="")
        return
    named = model or f"{layers} layers of {hidden}"
    advice = document.advice(problem, choices, named, sentences, gpu_was_named=gpu is not None)
    if picture is not None:
        from ...offline.advise.picture import draw
        from ...offline.plots import save

        save(draw(problem, choices, wanted), output_file(picture))
    print_json(advice) if as_json else shown.render(advice, console())


def _watch(problem: Problem, path: Path, job: str | None, ran: str, as_json: bool) -> None:
    from ...offline.advise import watch
    from ...offline.advise.measured import parse_ran

    running = parse_ran(ran)
    for news in watch.watch(problem, path, job, running):
        print_json(news) if as_json else watch.render(news, running, console())


def _is_book(path: Path) -> bool:
    from ...fleet import is_book

    try:
        return is_book(begin_of(path, 64))
    except OSError:
        return False  # the reader of the file reports the error


def _facts_and_rows(path: Path, fabric_id: str | None) -> tuple[Facts, NDArray[np.void]]:
    from ...fleet import READING, check_installed

    check_installed("a book", READING)
    from ...fleet.reading import default_rows, read_book

    return default_rows(read_book(str(path)), str(path), fabric_id)
