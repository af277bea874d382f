"""Parameters of the image encoder beside a decoder, and of what joins the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zerotune.store.errors import UserError
from zerotune.tuner.advice.models.kinds import is_count

_GATED: Final = ("qwen2_5_vl", "mistral3")
_JOINED: Final = {"gemma3": 1, "mistral3": 2}
"""Families with a projection of their own: matrices from the encoder's width to the decoder's."""


def vision_parameters(where: str, told: Mapping[str, Any], kind: str, width: int) -> int:
    """Of an image encoder of equal blocks.

    Args:
        where: names the configuration in messages.
        told: its part of the configuration.
        kind: the whole model's `model_type`.
        width: of the decoder.

    Returns:
        Parameters, biases left out.

    Raises:
        UserError: its width or its number of blocks is missing, or a size is no number.
    """

    def number(*names: str, default: int | None = 0) -> int:
        name, found = next(((name, told[name]) for name in names if told.get(name) is not None), (names[0], default))
        if found is not default and not is_count(found, 1):
            raise UserError(f"{where}: {name} of vision_config is {found!r}", "it must be a whole number from 1 on")
        if found is None:
            raise UserError(f"{where} has no {name} in its vision_config", "give a complete configuration file")
        return int(found)

    inner = number("embed_dim" if kind == "qwen2_vl" else "hidden_size", default=None)
    n_layers = number("depth", "num_hidden_layers", default=None)
    ffn = number("intermediate_size", default=4 * inner)
    patch = number("patch_size", default=14)
    in_block = 4 * inner * inner + (3 if kind in _GATED else 2) * inner * ffn
    channels = number("in_channels", "num_channels", default=3) * number("temporal_patch_size", default=1)
    in_patch = inner * channels * patch**2
    places = number("num_position_embeddings")
    if not places and kind in ("gemma3", "llama4"):
        places = (number("image_size") // patch) ** 2
    total = n_layers * in_block + in_patch + places * inner
    if kind == "llama4":
        hidden, out = number("projector_input_dim", default=4096), number("vision_output_dim", default=4096)
        return total + ffn * hidden + hidden * out + out * width
    if kind == "gemma3" and told.get("vision_use_head", True):
        total += in_block
    if kind in _JOINED:
        merged = inner * (4 * inner if kind == "mistral3" else 0)
        return total + merged + inner * width + (_JOINED[kind] - 1) * width * width
    wide = inner * number("spatial_merge_size", default=2) ** 2
    out = width if kind == "qwen2_vl" else number("out_hidden_size", default=width)
    merger = wide * wide + wide * out
    return total + merger * (1 + len(told.get("deepstack_visual_indexes") or ()))
