"""`zerotune models`: the fitted models, and which of them is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zerotune.tuner.cli import completion
from zerotune.tuner.cli.options import AsJson, StorePath, console, print_json
from zerotune.tuner.cli.paths import store_path

if TYPE_CHECKING:
    from zerotune.store.sqlite.database import Store

models = typer.Typer(
    help="""Fitted models: list and compare them, pin one, roll back.

    Example: zerotune models list""",
    no_args_is_help=True,
)

FabricId = Annotated[
    str | None, typer.Option("--fabric-id", help="Only this fabric's.", autocompletion=completion.fabric_ids)
]


@models.command(name="list")
def list_models(store: StorePath = None, fabric_id: FabricId = None, as_json: AsJson = False) -> None:
    """Every saved model: what it was fitted on, how far off it was, whether it is used.

    Example: zerotune models list
    """
    from zerotune.tuner.modeling import kept_models

    with kept_models.check_fabric(_reading(store), fabric_id) as opened:
        lines = kept_models.listed(opened, fabric_id)
    if as_json:
        print_json(lines)
        return
    kept_models.render(lines, console())


@models.command()
def compare(store: StorePath = None, fabric_id: FabricId = None, as_json: AsJson = False) -> None:
    """How well each kept model predicts what has been measured by now.

    Example: zerotune models compare --fabric-id emulated-h100_node-1f2e3d
    """
    from zerotune.tuner.modeling import kept_models

    with kept_models.check_fabric(_reading(store), fabric_id) as opened:
        found, lines = kept_models.compared(opened, fabric_id), kept_models.listed(opened, fabric_id)
    if as_json:
        print_json(found)
        return
    kept_models.render_comparison(found, lines, console())


@models.command()
def pin(
    model: Annotated[
        str, typer.Argument(help="Model id, as `zerotune models list` shows it.", autocompletion=completion.model_ids)
    ],
    store: StorePath = None,
    fabric_id: FabricId = None,
    as_json: AsJson = False,
) -> None:
    """Use this model until it is released, whatever is fitted meanwhile. No daemon may have the store open.

    Example: zerotune models pin kriging-1f2e3d4c
    """
    from zerotune.tuner.modeling import kept_models

    with kept_models.check_fabric(kept_models.open_for_change(store_path(store)), fabric_id) as opened:
        line = kept_models.pin(opened, model, fabric_id)
    if as_json:
        print_json(line)
        return
    print(f"{line.model_id} is pinned on fabric {line.fabric_id}")


@models.command(name="rollback")
def roll_back(store: StorePath = None, fabric_id: FabricId = None, as_json: AsJson = False) -> None:
    """Pin the model that was in use before the present one. No daemon may have the store open.

    Example: zerotune models rollback
    """
    from zerotune.tuner.modeling import kept_models

    with kept_models.check_fabric(kept_models.open_for_change(store_path(store)), fabric_id) as opened:
        line = kept_models.roll_back(opened, fabric_id)
    if as_json:
        print_json(line)
        return
    print(f"back to {line.model_id} on fabric {line.fabric_id}")


@models.command()
def release(store: StorePath = None, fabric_id: FabricId = None, as_json: AsJson = False) -> None:
    """Undo `pin` and `rollback`: the newest fit is used again. No daemon may have the store open.

    Example: zerotune models release
    """
    from zerotune.tuner.modeling import kept_models

    with kept_models.check_fabric(kept_models.open_for_change(store_path(store)), fabric_id) as opened:
        freed = kept_models.release(opened, fabric_id)
    if as_json:
        print_json(freed)
        return
    print(f"released on {', '.join(freed)}" if freed else "no model is pinned")


def _reading(store: StorePath) -> Store:
    from zerotune.store.sqlite.database import Store

    return Store.open(store_path(store), read_only=True)
