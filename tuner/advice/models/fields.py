"""The fields of a Hugging Face configuration, with its class's defaults for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from ....store.errors import UserError
from .kinds import is_count

DESCRIBE: Final = (
    "give the number of its parameters, as 7.5B (advise takes --layers, --hidden, --heads, --sequence, too)"
)
"""Remedy if a file does not describe the model."""
SPELLINGS: Final = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "embedding_width": ("word_embed_proj_dim", "embedding_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "context": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_width": (
        "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
    ),
    "sparse_step": ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"),
    "first_sparse": ("first_k_dense_replace", "moe_layer_start_index"),
    "vision_layers": ("depth", "num_hidden_layers"),
    "channels": ("in_channels", "num_channels"),
}  # fmt: skip


@cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Defaults of transformers' classes for fields that a file leaves out, by `model_type`."""
    found: dict[str, dict[str, Any]] = msgspec.json.decode((Path(__file__).parent / "families.json").read_bytes())
    return found


class Fields:
    """A configuration's fields; a missing or impossible one raises UserError, which names it."""

    def __init__(self, where: str, stated: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.where, self.stated, self.defaults = where, stated, defaults
        self.raw = {**defaults, **stated}  # null means none, not the class's default

    def number(self, name: str, *, default: int | None = None, least: int = 0) -> int:
        """A whole number under any of its names, a key of SPELLINGS or a field.

        Args:
            default: for a field that neither the file nor its class has; None: the field is required.
            least: the smallest valid number.

        Raises:
            UserError: the field is missing, or no such number.
        """
        names = SPELLINGS.get(name, (name,))
        source = self.stated if any(one in self.stated for one in names) else self.defaults
        for one in names:
            value = source.get(one)
            if isinstance(value, list) and value and len(set(map(str, value))) == 1:
                value = value[0]
            if value is None:
                continue
            if not is_count(value, least):
                raise UserError(f"{self.where}: {one} is {value!r}", f"it must be a whole number from {least} on")
            return int(value)
        if default is None:
            raise UserError(f"{self.where} has no {names[0]}", "give a complete configuration file")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Whether a flag is on; null means the default."""
        value = self.raw.get(name)
        return default if value is None else bool(value)
