"""Checks the kinds of values in a Hugging Face configuration before its fields are read.

Otherwise a text instead of a number would count as a missing field, whose default gives another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ....store.errors import UserError

_FLAGS: Final = frozenset({
    "tie_word_embeddings", "tie_embedding", "attention_bias", "multi_query", "new_decoder_architecture",
    "block_auto_adjust_ff_dim", "vision_use_head",
})  # fmt: skip
_LISTS: Final = {
    "layer_types": str, "layers_block_type": str, "mlp_layer_types": str, "attn_type_list": int, "moe_layers": int,
    "mlp_only_layers": int, "full_attn_idxs": int, "full_attn_layers": int, "deepstack_visual_indexes": int,
}  # fmt: skip
"""Names of lists, and the kinds of their elements."""
_SECTIONS: Final = ("text_config", "vision_config", "linear_attn_config")
_TEXTS: Final = ("model_type", "hybrid_override_pattern")
_SIZES: Final = {
    "num_hidden_layers": 1, "hidden_size": 1, "vocab_size": 1, "d_ff": 1, "d_kv": 1, "ffn_dim": 1,
    "intermediate_size": 1, "moe_intermediate_size": 1, "block_ff_dim": 1, "block_multiple_of": 1,
    "attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0,
    "full_attention_interval": 1, "first_k_dense_replace": 0, "interleave_moe_layer_step": 1, "v_head_dim": 1,
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 1, "linear_value_head_dim": 1,
    "mamba_num_heads": 1, "mamba_n_heads": 1, "mamba_n_groups": 1, "n_groups": 1, "mamba_d_state": 1,
    "ssm_state_size": 1, "mamba_expand": 1, "moe_layer_start_index": 0, "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}  # fmt: skip
"""Fields that are `null` in no class, and the least number of each."""
_OF_IMAGES: Final = (
    "embed_dim", "depth", "patch_size", "in_channels", "num_channels", "temporal_patch_size", "num_position_embeddings",
    "image_size", "projector_input_dim", "vision_output_dim", "spatial_merge_size", "out_hidden_size", "mlp_ratio",
)  # fmt: skip
_SHARES: Final = ("block_ffn_dim_multiplier", "downsample_ratio")
_OF_LINEAR: Final = ("num_heads", "head_dim", "short_conv_kernel_size")
MOST: Final = 1 << 50
_SHOWN: Final = 80


def check_kinds(where: str, raw: Mapping[str, Any]) -> None:
    """Check the fields of a configuration and of its parts; `where` names it in messages.

    Raises UserError if a field has a value of another kind, or is `null` although no class allows that.
    """
    for name, value in raw.items():
        wanted = _wanted(name, value)
        if wanted is not None:
            shown = "null" if value is None else repr(str(value)[:_SHOWN])
            raise UserError(f"{where}: {name} is {shown}", f"it must be {wanted}")
        if name in _SECTIONS and value is not None:
            check_kinds(f"{where}, {name}", value)


def is_count(value: object, least: int) -> bool:
    """Whether the value is a whole number from `least` on, and a possible size."""
    return type(value) is int and least <= value <= MOST


def _wanted(name: str, value: Any) -> str | None:
    """The valid kind of the field; None: it is valid, or not read."""
    if value is None:
        return "given, or left out" if name in (*_SIZES, "full_attn_layers", "downsample_ratio") else None
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name in _LISTS:
        of = _LISTS[name]
        is_list = isinstance(value, list) and all(type(one) is of for one in value)
        return None if is_list else "a list of names" if of is str else "a list of whole numbers"
    if name in _SECTIONS:
        return None if isinstance(value, dict) else "an object"
    if name in _TEXTS:
        return None if isinstance(value, str) else "a text"
    if name in _SHARES:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 1 / MOST < value < MOST
        return None if is_number else "a number above 0"
    if name in _OF_LINEAR:
        return None if is_count(value, 1) else "a whole number from 1 on"
    least = 1 if name in _OF_IMAGES else _SIZES.get(name)
    if least is None or isinstance(value, list):  # a list by layer or side of an image, which its reader checks
        return None
    return None if is_count(value, least) else f"a whole number from {least} on"
