"""Parameters of the image encoder beside a decoder, and of the projection between them."""

from __future__ import annotations

from typing import Final

from .fields import Fields

_GATED: Final = ("qwen2_5_vl", "mistral3")
_JOINED: Final = {"gemma3": 1, "mistral3": 2, "internvl": 2}
"""Families with a projection of their own: matrices from the encoder's width to the decoder's."""

OUTSIDE: Final = ("downsample_ratio", "spatial_merge_size")
"""The encoder's fields that some families keep outside of `vision_config`."""


def vision_parameters(encoder: Fields, kind: str, width: int) -> int:
    """Parameters, without biases, of an image encoder of equal blocks beside a decoder of this `width`.

    `encoder` is the encoder's part of the configuration, `kind` the whole model's `model_type`.
    """

    def number(name: str, default: int | None = None) -> int:
        return encoder.number(name, default=default, least=1)

    inner = number("embed_dim" if kind == "qwen2_vl" else "hidden_size")
    n_layers = number("vision_layers")
    ffn = number("mlp_ratio") * inner if kind == "qwen2_vl" else number("intermediate_size")
    patch = number("patch_size")
    in_block = 4 * inner * inner + (3 if kind in _GATED else 2) * inner * ffn
    in_patch = inner * number("channels") * number("temporal_patch_size", 1) * patch**2
    places = encoder.number("num_position_embeddings", default=0)
    if not places and kind in ("gemma3", "llama4", "internvl"):
        places = (number("image_size") // patch) ** 2
    total = n_layers * in_block + in_patch + places * inner
    if kind == "llama4":
        hidden, out = number("projector_input_dim"), number("vision_output_dim")
        return total + ffn * hidden + hidden * out + out * width
    if kind == "gemma3" and encoder.flag("vision_use_head", True):
        total += in_block
    merged = number("spatial_merge_size", 2) ** 2
    if kind in _JOINED:
        seen = inner
        if kind == "mistral3":
            total += merged * inner * inner
        elif kind == "internvl":
            seen = round(inner / encoder.raw["downsample_ratio"] ** 2)
        return total + seen * width + (_JOINED[kind] - 1) * width * width
    wide = inner * merged
    out = width if kind == "qwen2_vl" else number("out_hidden_size")
    return total + (wide * wide + wide * out) * (1 + len(encoder.raw.get("deepstack_visual_indexes") or ()))
