"""Checks a user's arguments before anything is done; `SettingsError` refuses them in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Final

from torch import Tensor, nn

from .errors import SettingsError

_MOST_SHOWN = 60
_MOST_VARIANTS = 3
VARIANT_FIELDS: Final = ("cga_cluster_size", "cta_policy", "max_ctas", "min_ctas", "nvls_ctas", "traffic_class")
"""Fields of NCCL's communicator config that a variant may have, by torch's names."""


def refusal(name: str, value: object, wanted: str) -> SettingsError:
    """The error for an invalid argument; `wanted` says in words what it must be."""
    shown = repr(value)
    if "\n" in shown or len(shown) > _MOST_SHOWN:  # a whole module or tensor
        kind = nn.Parameter if isinstance(value, nn.Parameter) else type(value)  # not our placeholder class
        shown = f"of type {kind.__name__}"
    return SettingsError(f"{name} is {shown}; it must be {wanted}")


def whole_number(name: str, value: object, least: int) -> int:
    """Refuses an argument that is no int of at least `least`, such as True or 3.0; returns any other."""
    if type(value) is not int or value < least:
        raise refusal(name, value, f"an int of at least {least}")
    return value


def number(name: str, value: Any, wanted: str, is_right: Callable[[Any], bool]) -> None:
    """Refuses an argument that is no number, and an invalid number; `wanted` says in words what it must be.

    A tensor of one element counts as a number.
    """
    if not (isinstance(value, (Real, Tensor)) and is_right(value)):
        raise refusal(name, value, wanted)


def json_dict(name: str, values: Mapping[str, Any] | None) -> None:
    """Refuses an argument that is no dict, or that JSON cannot hold."""
    if values is not None and not isinstance(values, Mapping):
        raise refusal(name, values, "a dict of what JSON can hold, or None")
    for key, value in (values or {}).items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError, RecursionError):
            wanted = "what JSON can hold: numbers, texts, lists, dicts; .tolist() makes a list of a tensor"
            raise refusal(f"{name}[{key!r}]", value, wanted) from None


def communicator_variants(value: Sequence[Mapping[str, int]]) -> tuple[dict[str, int], ...]:
    """Configs of communicators, as the user lists them: at most three, with fields of `VARIANT_FIELDS`."""
    wanted = f"a list of at most {_MOST_VARIANTS} dicts, such as [{{'max_ctas': 8}}]"
    if not isinstance(value, list | tuple):
        raise refusal("communicator_variants", value, wanted)
    if len(value) > _MOST_VARIANTS:
        raise SettingsError(f"communicator_variants has {len(value)} entries; it must be {wanted}")
    for place, config in enumerate(value):
        if not isinstance(config, Mapping) or not config:
            raise refusal(f"communicator_variants[{place}]", config, f"a dict of {', '.join(VARIANT_FIELDS)}")
        for name, number_ in config.items():
            if name not in VARIANT_FIELDS:
                known = ", ".join(VARIANT_FIELDS)
                raise SettingsError(f"communicator_variants[{place}] has {name!r}; choose from {known}")
            whole_number(f"communicator_variants[{place}][{name!r}]", number_, 1 if name.endswith("ctas") else 0)
        if config.get("min_ctas", 0) > config.get("max_ctas", 0):
            why = "NCCL refuses min_ctas without a max_ctas that is as large"
            raise SettingsError(f"communicator_variants[{place}] is {dict(config)}; {why}")
    return tuple(dict(sorted(config.items())) for config in value)
