"""`zerotune store book show | diff`: reads books by URL, prints winners as tables, and compares two books."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...store.counted import counted
from ...store.errors import BookError, UserError, printable, reason
from ...store.records import PlanRow
from ...store.sqlite.rows.measurements import MEASUREMENT
from .book import MAX_BYTES, Book, Cell, opened
from .signing import Verifier
from .storage import Storage, shown

if TYPE_CHECKING:
    from rich.console import Console


def read_book(url: str, verifier: Verifier | None = None) -> Book:
    """The book at a path or URL; without a verifier, signatures are not checked.

    Raises:
        BookError: it cannot be read, or `opened` refuses it.
        UserError: there is no such protocol.
    """
    storage = Storage(url)
    try:
        data = storage.read("", MAX_BYTES)
    except Exception as error:  # of any library below fsspec
        missing = isinstance(error, FileNotFoundError)
        is_of_system = isinstance(error, OSError) and error.strerror
        message = reason(error) if is_of_system else f"{type(error).__name__}: {reason(error)}"
        words = "there is none" if missing else message[:160]
        raise BookError(f"cannot read the book {shown(url)}: {words}", "name its file or URL") from error
    return opened(data, shown(url), verifier)


class Difference(NamedTuple):
    """A key at which two books have different winners; None: NCCL's own choice."""

    before: Cell | None
    after: Cell | None


def differences(before: Book, after: Book) -> Iterator[Difference]:
    """Keys at which the winners of two books differ, sorted."""
    left, right = ({_place(one): one for one in book.winners()} for book in (before, after))
    for place in sorted(left.keys() | right.keys()):
        pair = Difference(left.get(place), right.get(place))
        if pair.before is None or pair.after is None or pair.before.candidate != pair.after.candidate:
            yield pair


def to_json(book: Book) -> dict[str, Any]:
    """A whole book as JSON, for scripts."""
    import msgspec

    kinds = {"fabrics": book.fabrics, "contributors": book.contributors, "skipped": book.skipped, "cells": book.cells}
    return {
        "head": msgspec.to_builtins(book.head),
        **{name: msgspec.to_builtins(lines) for name, lines in kinds.items()},
        "n_unusable": book.n_unusable,
        "signed_by": book.signed_by,
    }


def render(book: Book, console: Console, fabric_id: str | None = None, *, is_checked: bool = False) -> None:
    """Print a book's origin, contributors that were set aside, and its winners by fabric."""
    from rich.markup import escape
    from rich.table import Table

    head, made = book.head, datetime.fromtimestamp(book.head.made_at_s, timezone.utc)
    by = (
        f"signed by {book.signed_by[:16]}" + ("" if is_checked else ", not checked") if book.signed_by else "not signed"
    )
    lines = [
        f"{counted(head.n_rows, 'measurement')} of {counted(head.n_jobs, 'job')}, {counted(head.n_objects, 'object')}"
        f" below {head.url}",
        f"made {made:%Y-%m-%d %H:%M} UTC by {head.made_by}; {by}",
    ]
    aside = [one for one in book.contributors if one.is_set_aside]
    lines += [f"set aside: {one.shown}{f' on {one.fabric_id}' * bool(one.fabric_id)}, {_why(one)}" for one in aside]
    lines += [
        f"outlying: {one.shown} on {one.fabric_id}, in {one.n_outlying} of {one.n_judged} cells"
        for one in book.contributors
        if one.n_outlying and not one.is_set_aside
    ]
    n_refused = {one.shown: one.n_refused_rows for one in book.contributors if one.n_refused_rows}
    lines += [f"impossible numbers: {n:,} rows of {name}" for name, n in n_refused.items()]
    lines += [f"skipped: {one.path}: {one.reason}" for one in book.skipped[:10]]
    if len(book.skipped) > 10:
        lines.append(f"skipped: {len(book.skipped) - 10:,} more")
    if book.n_unusable:
        lines.append(f"{book.n_unusable:,} lines cannot be, and are left out")
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    winners: dict[str, list[Cell]] = {}
    for one in book.winners(fabric_id):
        winners.setdefault(one.fabric_id, []).append(one)
    for known in dict.fromkeys(fabric.fabric_id for fabric in book.fabrics):
        if fabric_id not in (None, known):
            continue
        if known not in winners:
            words = f"{printable(known)}: nothing beats NCCL's own choice"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
            continue
        table = Table(title=f"{escape(known)}: settings that beat NCCL's own choice", title_justify="left")
        for name in ("NCCL", "ranks", "collective", "phase", "from bytes", "setting"):
            table.add_column(name)
        for name in ("us", "gain", "give or take", "jobs", "nodes", "calls"):
            table.add_column(name, justify="right")
        for one in winners[known]:
            table.add_row(
                _release(one.nccl_version), f"{one.n_ranks} on {one.n_nodes}", one.collective, one.phase,
                f"{one.bytes_range[0]:,}", str(one.candidate), f"{one.median_us:.1f}", percent(one.gain),
                f"{100 * (one.gain_std or 0):.1f} %", str(one.n_jobs), str(one.n_contributors), f"{one.n_calls:,}",
            )  # fmt: skip
        console.print(table)


def render_differences(found: list[Difference], console: Console) -> None:
    """Print keys whose winners differ."""
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for name in ("fabric", "NCCL", "ranks", "collective", "phase", "from bytes", "before", "after"):
        table.add_column(name)
    for pair in found:
        one = pair.after or pair.before
        assert one is not None
        table.add_row(
            escape(one.fabric_id), _release(one.nccl_version), f"{one.n_ranks} on {one.n_nodes}", one.collective,
            one.phase, f"{one.bytes_range[0]:,}", *(
                "NCCL's own choice" if side is None else f"{side.candidate} ({percent(side.gain)})" for side in pair
            ),
        )  # fmt: skip
    console.print(table)
    console.print(f"{len(found)} winners differ", highlight=False)


def plan_rows(book: Book, name: str, fabric_id: str | None = None) -> tuple[str, tuple[PlanRow, ...]]:
    """The winners on one fabric as rows of a plan, and the fabric's id.

    Without `fabric_id`, there must be winners on only one fabric.

    Raises:
        UserError: no setting wins there, or several fabrics have winners.
    """
    wanted = _one_fabric(book.winners(), shown(name), fabric_id)
    rows = [
        PlanRow(
            one.key.communicator, one.key.collective, one.key.phase, *one.bytes_range, one.candidate,
            f"{percent(one.gain)} faster on other nodes",
        )
        for one in book.winners(wanted)
    ]  # fmt: skip
    return wanted, tuple(rows)


def default_rows(
    book: Book, name: str, fabric_id: str | None = None
) -> tuple[dict[str, str | int | float | bool], NDArray[np.void]]:
    """Times of NCCL's own choices on one fabric, in a row for each size class of a collective.

    Returns the fabric's description, and MEASUREMENT, shape (n,), with message bytes in the middle of their class.
    Without `fabric_id`, the book must have only one.

    Raises:
        UserError: the book has nothing of that fabric, or has several fabrics.
    """
    defaults = [one for one in book.cells if one.is_default]
    wanted = _one_fabric(defaults, shown(name), fabric_id)
    cells = [one for one in defaults if one.fabric_id == wanted]
    rows = np.zeros(len(cells), MEASUREMENT)
    rows["message_bytes"] = [math.sqrt(math.prod(one.bytes_range)) for one in cells]
    rows["collective"] = [one.key.collective for one in cells]
    for field, of in (("duration_us", "median_us"), ("n_ranks", "n_ranks"), ("n_nodes", "n_nodes")):
        rows[field] = [getattr(one, of) for one in cells]
    return next((one.facts for one in book.fabrics if one.fabric_id == wanted), {}), rows


def _one_fabric(cells: Iterable[Cell], name: str, fabric_id: str | None) -> str:
    fabrics = sorted({one.fabric_id for one in cells})
    if not fabrics or fabric_id not in (None, *fabrics):
        where = f" of fabric {fabric_id}" if fabric_id is not None else ""
        raise UserError(f"{name} has nothing to use{where}", "`zerotune store book show` lists what it has")
    if fabric_id is None and len(fabrics) > 1:
        remedy = f"name one with --fabric-id: {', '.join(fabrics[:8])}"
        raise UserError(f"{name} is of {len(fabrics)} fabrics", remedy)
    return fabrics[0] if fabric_id is None else fabric_id


def percent(gain: float | None) -> str:
    """A gain (log) as the saved share of time."""
    return "" if gain is None else f"{-100.0 * math.expm1(-gain):.1f} %"


def _why(one: Any) -> str:
    if one.is_level_off:
        return f"everything takes {math.exp(one.level):.3g} times as long as elsewhere"
    if not one.n_judged:
        return f"{counted(one.n_jobs, 'job')} by keys that are not in the list of contributors"
    return f"{one.n_outlying} of {one.n_judged} cells are far off all others'"


def _release(version: int) -> str:
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}" if version else "?"


def _place(one: Cell) -> tuple[Any, ...]:
    return (
        one.fabric_id, one.nccl_version, one.tuner_abi, one.n_ranks, one.n_nodes, one.collective, one.phase,
        one.size_class,
    )  # fmt: skip
