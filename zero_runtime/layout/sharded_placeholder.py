"""Placeholders of stage-3 parameters while a rank has only its shard: they refuse reads of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import LifecycleError

NAME = "_zero_runtime_name"


class ShardedPlaceholder(nn.Parameter):
    """The class of a parameter that is not whole: it has its shape, gradient and the like, but no values.

    Changing an object's class takes less than 0.1 us, and a whole parameter is a plain one, also for torch.compile.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Torch's answer if it needs no values; otherwise raises `LifecycleError`."""
        # torch does not annotate it.
        found = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if getattr(func, "__self__", None) is Tensor.grad:
            return found
        placeholders = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls]
        values = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor | float)]
        if placeholders and any(value is not placeholders[0] for value in values):
            name = vars(placeholders[0])[NAME]
            raise LifecycleError(
                f"parameter {name} is read outside the forward of its layer, while this rank holds its shard only; "
                "call the sharded model itself, name layers without that parameter by zero_runtime.shard(layers=...), "
                "or read it inside engine.full_parameters()"
            )
        return found


def make_placeholder(parameter: nn.Parameter, name: str) -> None:
    """Marks a parameter as without values; a user's own class is kept."""
    if type(parameter) is nn.Parameter:
        vars(parameter)[NAME] = name
        parameter.__class__ = ShardedPlaceholder


def make_plain(parameter: nn.Parameter) -> None:
    """Marks a parameter as having values again."""
    if type(parameter) is ShardedPlaceholder:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # its original class
