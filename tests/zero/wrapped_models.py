"""Models whose forward does what real ones do: recomputes, repeats, shares, freezes, adapts, returns objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


Pass = Callable[[nn.ModuleList, Tensor], Tensor]
"""How a model sends a tensor through its blocks."""


class Net(nn.Module):
    def __init__(self, through: Pass, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(4)])
        self.last = nn.Linear(WIDTH, 3)
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.through(self.blocks, self.first(x))).float().square().mean()


def one_by_one(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def in_reverse(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in reversed(blocks):
        x = block(x)
    return x


def again_at_once(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(block(x))
    return x


def again_at_the_end(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return one_by_one(blocks, one_by_one(blocks, x))


def each_recomputed(reentrant: bool, through: Pass = one_by_one) -> Pass:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        again = [lambda y, block=block: checkpoint(block, y, use_reentrant=reentrant) for block in blocks]
        return through(again, x)

    return run


def all_recomputed(reentrant: bool) -> Pass:
    return lambda blocks, x: checkpoint(lambda y: one_by_one(blocks, y), x, use_reentrant=reentrant)


class RecomputesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.gain = Block(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) * self.gain


class Adapted(nn.Module):
    """A frozen linear layer and a trainable correction of rank 2, as LoRA has it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.into = nn.Linear(frozen.in_features, 2, bias=False)
        self.out = nn.Linear(2, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.out(self.into(x))


class Carrier:
    """A tensor in an object that torch knows nothing of."""

    __slots__ = ("inside",)

    def __init__(self, inside: Tensor) -> None:
        self.inside = {"x": inside}


class ReturnsObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor | Carrier) -> Carrier:
        x = x.inside["x"] if isinstance(x, Carrier) else x
        return Carrier(x + torch.tanh(self.linear(x)))


def unpacked(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return one_by_one(blocks, x).inside["x"]


class Delivers(nn.Module):
    """Leaves its result where `taken` finds it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.gain, self.how = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH)), how

    def forward(self, x: Tensor, place: dict[str, Tensor]) -> Callable[[], Tensor] | None:
        result = x + torch.tanh(self.linear(x)) * self.gain
        if self.how == "closure":
            return lambda: result
        if self.how == "dict":
            place["x"] = result
        else:
            self.result = result
        return None


def taken(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        place: dict[str, Tensor] = {}
        closure = block(x, place)
        x = place["x"] if place else closure() if closure else block.result
    return x


class Table(nn.Module):
    """Returns what `show` makes of its own parameter."""

    def __init__(self, show: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.rows, self.show = nn.Parameter(torch.randn(6, WIDTH)), show

    def forward(self) -> Any:
        return self.show(self.rows)


def times_rows(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Multiplies by each table when the next block is done."""
    rows = [block() for block in blocks if isinstance(block, Table)]
    for block, row in zip([block for block in blocks if isinstance(block, Block)], rows, strict=True):
        found = row["rows"].inside["x"] if isinstance(row, dict) else row
        x = block(x) * found[: len(x)]
    return x


def shown(show: Callable[[Tensor], Any]) -> nn.Module:
    return Net(times_rows, [Table(show), Block(), Table(show), Block()])


def adapted(through: Pass) -> nn.Module:
    model = Net(through).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def shared_by_layers() -> nn.Module:
    """A weight in two layers, a module in two others."""
    model = Net(one_by_one)
    model.blocks[2].up.weight = model.blocks[1].up.weight
    model.blocks[3].down = model.blocks[0].down
    return model


class Quantised(nn.Module):
    """A frozen matrix of integers with its scale and a trainable correction."""

    def __init__(self) -> None:
        super().__init__()
        integers = torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8)
        self.integers = nn.Parameter(integers, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.01), requires_grad=False)
        self.correction = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert self.integers.dtype is torch.int8
        return nn.functional.linear(x, self.integers * self.scale) + self.correction(x)


class Hollow(nn.Module):
    """Has parameters, and nothing in them."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH), requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.nothing])


def layer_at_two_places() -> nn.Module:
    block = Block()
    return Net(one_by_one, [block, Block(), block])


def adapted_behind_a_trained_layer(through: Pass) -> nn.Module:
    """A reentrant checkpoint, in plain torch too, wants an input through which a gradient flows."""
    model = adapted(through)
    model.first.requires_grad_(True)
    return model


def partly_frozen() -> nn.Module:
    model = Net(one_by_one)
    for part in (model.first, model.blocks[0], model.blocks[2], model.blocks[3].up):
        part.requires_grad_(False)
    return model


def batch(rank: int, step: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(4, WIDTH, generator=draw),)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return make()

    return build


WRAPPED = {
    name: (_seeded(make), batch)
    for name, make in {
        "recomputed": lambda: Net(each_recomputed(False)),
        "recomputed-reentrant": lambda: Net(each_recomputed(True)),
        "recomputed-at-once": lambda: Net(all_recomputed(False)),
        "recomputed-at-once-reentrant": lambda: Net(all_recomputed(True)),
        "recomputed-inside": lambda: Net(one_by_one, [RecomputesInside() for _ in range(3)]),
        "in-reverse": lambda: Net(in_reverse),
        "again-at-once": lambda: Net(again_at_once),
        "again-at-the-end": lambda: Net(again_at_the_end),
        "again-recomputed": lambda: Net(each_recomputed(False, again_at_the_end)),
        "again-recomputed-reentrant": lambda: Net(each_recomputed(True, again_at_the_end)),
        "shared-by-layers": shared_by_layers,
        "layer-at-two-places": layer_at_two_places,
        "partly-frozen": partly_frozen,
        "adapted": lambda: adapted(one_by_one),
        "adapted-again": lambda: adapted(again_at_the_end),
        "adapted-recomputed": lambda: adapted(each_recomputed(False)),
        "objects": lambda: Net(unpacked, [ReturnsObject() for _ in range(3)]),
        "quantised": lambda: Net(one_by_one, [Quantised() for _ in range(3)]),
        "hollow": lambda: Net(one_by_one, [Block(), Hollow(frozen=False), Block()]),
        "hollow-frozen": lambda: Net(one_by_one, [Block(), Hollow(frozen=True), Block()]),
        "adapted-recomputed-reentrant": lambda: adapted_behind_a_trained_layer(each_recomputed(True)),
        **{
            f"delivers-by-{how}": lambda how=how: Net(taken, [Delivers(how) for _ in range(3)])
            for how in ("dict", "attribute", "closure")
        },
        "returns-its-parameter": lambda: shown(lambda rows: rows),
        "returns-views": lambda: shown(lambda rows: rows[1:]),
        "returns-detached-views": lambda: shown(lambda rows: rows.detach()[1:]),
        "returns-views-in-objects": lambda: shown(lambda rows: {"rows": Carrier(rows[1:])}),
    }.items()
}
