"""Checks a user's arguments before anything is done; errors are one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn

from .errors import SettingsError

_MOST_SHOWN = 60


def refusal(name: str, value: object, wanted: str) -> SettingsError:
    """The error for an invalid argument.

    Args:
        wanted: what it must be, in words.

    Returns:
        The error, to be raised.
    """
    shown = repr(value)
    if "\n" in shown or len(shown) > _MOST_SHOWN:  # a whole module or tensor
        kind = nn.Parameter if isinstance(value, nn.Parameter) else type(value)  # not our placeholder class
        shown = f"of type {kind.__name__}"
    return SettingsError(f"{name} is {shown}; it must be {wanted}")


def whole_number(name: str, value: object, least: int) -> int:
    """Refuses an argument that is no int of at least `least`.

    Returns:
        `value`.

    Raises:
        SettingsError: it is anything else, such as True or 3.0.
    """
    if type(value) is not int or value < least:
        raise refusal(name, value, f"an int of at least {least}")
    return value


def number(name: str, value: Any, wanted: str, is_right: Callable[[Any], bool]) -> None:
    """Refuses an argument that is no number, and an invalid number.

    Args:
        value: the argument; a tensor of one element counts as a number.
        wanted: what it must be, in words.

    Raises:
        SettingsError: it is refused.
    """
    if not (isinstance(value, (Real, Tensor)) and is_right(value)):
        raise refusal(name, value, wanted)


def json_dict(name: str, values: Mapping[str, Any] | None) -> None:
    """Refuses an argument that is no dict, or that JSON cannot hold.

    Raises:
        SettingsError: it is refused.
    """
    if values is not None and not isinstance(values, Mapping):
        raise refusal(name, values, "a dict of what JSON can hold, or None")
    for key, value in (values or {}).items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError, RecursionError):
            wanted = "what JSON can hold: numbers, texts, lists, dicts; .tolist() makes a list of a tensor"
            raise refusal(f"{name}[{key!r}]", value, wanted) from None
