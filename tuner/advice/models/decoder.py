"""Parameters of a decoder whose blocks may differ: attention of several kinds, state spaces, experts in some of them.

They follow from the common fields of Hugging Face's configurations; missing fields have the class's defaults
(`families.json`, which `python -m benchmarks.advice.model_families` renews from transformers). Biases and norms count
if they are more than a ten-thousandth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from ....store.errors import UserError
from .fields import DESCRIBE, Fields, class_defaults

Mixer = Literal["attention", "delta", "lightning", "mamba", "mamba1", "conv", "none"]
Feed = Literal["dense", "sparse", "none"]
MAX_LAYERS: Final = 100_000
MIXERS: Final[dict[str, Mixer]] = {
    "full_attention": "attention", "sliding_attention": "attention", "chunked_attention": "attention",
    "indexed_attention": "attention", "attention": "attention", "*": "attention",
    "mamba": "mamba", "M": "mamba", "conv": "conv",
    "mlp": "none", "-": "none", "moe": "none", "E": "none",
}  # fmt: skip
_FEEDS: Final[dict[str, Feed]] = {"mlp": "dense", "-": "dense", "moe": "sparse", "E": "sparse"}
_LINEAR: Final[dict[str, Mixer]] = {"minimax": "lightning", "minimax_text_01": "lightning", "minimax_m1": "lightning"}
"""Kind of linear attention by family; others have a gated delta rule or, with `mamba_` fields, a state space."""
_TWO_MATRICES: Final = ("apertus", "arcee", "nemotron_h")
"""Families whose feed-forward has no gate."""
_GATED_QUERIES: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")


class Decoder(Fields):
    """A decoder's configuration, with its class's defaults for missing fields."""

    def __init__(self, where: str, stated: Mapping[str, Any], kind: str) -> None:
        super().__init__(where, stated, class_defaults()[kind])
        self.kind = kind
        self.n_layers = 0
        self.mixers, self.feeds = self._kinds()
        self.width = self.number("width", least=1)
        self.n_heads = self.number("heads", least=1)
        self.n_kv_heads = self.number("kv_heads", default=self.n_heads, least=1)
        if self.width % self.n_heads and not (self.raw.get("head_dim") or self.raw.get("kv_lora_rank")):
            raise UserError(
                f"{where}: a width of {self.width} cannot be divided among {self.n_heads} heads",
                "correct one, or give head_dim",
            )
        self.head_width = self.number("head_dim", default=self.width // self.n_heads) or self.width // self.n_heads
        self.gated = kind not in _TWO_MATRICES

    def _kinds(self) -> tuple[list[Mixer], list[Feed]]:
        pattern = self.raw.get("hybrid_override_pattern") or self.raw.get("layers_block_type")
        if self.kind == "nemotron_h":
            if not pattern:
                raise UserError(f"{self.where} has no hybrid_override_pattern", "give a complete configuration file")
            self.n_layers = len(pattern)
            if self.number("layers", default=self.n_layers) != self.n_layers:
                raise UserError(
                    f"{self.where} has {self.number('layers')} layers, but a pattern of {self.n_layers}", "correct one"
                )
            return self._mixers(pattern), [_FEEDS.get(str(one), "none") for one in pattern]
        self.n_layers = self.number("layers", least=1)
        if self.n_layers > MAX_LAYERS:
            raise UserError(f"{self.where}: num_hidden_layers is {self.n_layers}", f"give {MAX_LAYERS:,} at most")
        return self._mixers(self._types()), [self._feed(layer) for layer in range(self.n_layers)]

    def _types(self) -> list[str]:
        """The kind of each layer's mixer, in transformers' terms."""
        every, period = (self.number(name, default=0) for name in ("full_attention_interval", "attn_layer_period"))
        linear, listed = self.raw.get("linear_attn_config"), self.raw.get("full_attn_idxs")
        given, flags = self._of_layers("layer_types"), self._of_layers("attn_type_list")
        layers, full = range(self.n_layers), "full_attention"
        if given is not None:
            return given
        if linear is not None:
            if "full_attn_layers" not in linear:
                raise UserError(f"{self.where}: linear_attn_config has no full_attn_layers", "give a complete file")
            return [full if layer + 1 in linear["full_attn_layers"] else "linear_attention" for layer in layers]
        if listed is not None:
            return [full if layer in listed else "conv" for layer in layers]
        if flags is not None:
            return [full if one else "linear_attention" for one in flags]
        if period:
            offset = self.number("attn_layer_offset", default=0)
            return [full if layer % period == offset else "mamba1" for layer in layers]
        if every:
            return ["linear_attention" if (layer + 1) % every else full for layer in layers]
        unit = self.defaults.get("layer_types", [full])
        if not unit:
            raise UserError(f"{self.where} has no layer_types", "give a complete configuration file")
        return [unit[layer % len(unit)] for layer in layers]

    def _of_layers(self, name: str) -> list[Any] | None:
        """A list with one entry for each layer."""
        given: list[Any] | None = self.stated.get(name)
        if given is not None and len(given) != self.n_layers:
            raise UserError(f"{self.where} has {self.n_layers} layers, but {len(given)} {name}", "correct one")
        return given

    def _mixers(self, types: Any) -> list[Mixer]:
        linear: Mixer = _LINEAR.get(self.kind, "mamba" if self.raw.get("mamba_n_heads") else "delta")
        known = {**MIXERS, "linear_attention": "mamba" if self.kind == "nemotron_h" else linear, "mamba1": "mamba1"}
        unknown = {str(one) for one in types} - set(known)
        if unknown:
            raise UserError(
                f"{self.where} has layers of the kind {min(unknown)!r}, which is not known here",
                f"pip install 'zerotune[models]', whose class counts it; or {DESCRIBE}",
            )
        return [known[str(one)] for one in types]

    def _feed(self, layer: int) -> Feed:
        if self.number("experts", default=1) <= 1:
            return "dense"
        types = self._of_layers("mlp_layer_types")
        if types is not None:
            return "dense" if types[layer] == "dense" else "sparse"
        listed = self.stated.get("moe_layers")
        if listed is not None:
            return "sparse" if layer in listed else "dense"
        dense = self.raw.get("mlp_only_layers")
        step = self.number("sparse_step", default=1) or 1
        first, last = self.number("first_sparse", default=0), self.number("moe_layer_end_index", default=-1, least=-1)
        if period := self.number("expert_layer_period", default=0):
            return "sparse" if layer % period == self.number("expert_layer_offset", default=0) else "dense"
        is_outside = layer < first or -1 < last < layer
        is_dense = (isinstance(dense, list) and layer in dense) or is_outside or (layer + 1) % step
        return "dense" if is_dense else "sparse"

    # ---- what parts have -------------------------------------------------------------------------------------------

    def attention(self) -> int:
        """Parameters of attention with shared key-value heads, or with latent ones (MLA)."""
        width, heads = self.width, self.n_heads
        rank = self.number("kv_lora_rank", default=0)
        if not rank:
            query, kv = heads * self.head_width, self.n_kv_heads * self.head_width
            queries = 2 if self.kind in _GATED_QUERIES else 1
            biases = query + 2 * kv if self.raw.get("attention_bias") or self.kind == "qwen2" else 0
            return width * ((1 + queries) * query + 2 * kv) + biases
        nope, rope = self.number("qk_nope_head_dim"), self.number("qk_rope_head_dim")
        value, query_rank = self.number("v_head_dim"), self.number("q_lora_rank", default=0)
        query = heads * (nope + rope)
        queries = width * query_rank + query_rank + query_rank * query if query_rank else width * query
        indexer = self.number("index_n_heads", default=0)
        of_indexer = self.number("index_head_dim", default=0)
        looks = indexer * (query_rank * of_indexer + width) + width * of_indexer if indexer else 0
        return queries + width * (rank + rope) + rank * (1 + heads * (nope + value)) + heads * value * width + looks

    def _delta(self) -> int:
        """Parameters of a gated delta rule."""
        if self.kind == "kimi_linear":
            return self._kimi_delta()
        key = self.number("linear_num_key_heads") * self.number("linear_key_head_dim")
        n_values = self.number("linear_num_value_heads")
        value = n_values * self.number("linear_value_head_dim")
        kernel = self.number("linear_conv_kernel_dim", default=4)
        return (2 * key + value) * kernel + self.width * (2 * key + 3 * value + 2 * n_values) + 2 * n_values

    def _kimi_delta(self) -> int:
        given = self.raw.get("linear_attn_config") or {}
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
        usual = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        heads, each, kernel = (
            self.number(one) if given.get(name) is None else given[name] for one, name in zip(usual, names, strict=True)
        )
        inner = heads * each
        low_rank = 2 * (self.width * each + each * inner)
        return 4 * self.width * inner + 3 * inner * kernel + low_rank + self.width * heads + inner

    def _lightning(self) -> int:
        return 5 * self.width * self.n_heads * self.head_width

    def _mamba(self) -> int:
        """Parameters of Mamba 2: state spaces with heads."""
        heads = self.number("mamba_n_heads", default=self.number("mamba_num_heads", default=0))
        each = 0 if self.raw.get("mamba_d_head") == "auto" else self.number("mamba_d_head", default=0)
        each = each or self.number("mamba_head_dim", default=0)
        inner = heads * each if each else self.number("mamba_expand", default=2) * self.width
        groups = self.number("mamba_n_groups", default=self.number("n_groups", default=1))
        state = self.number("mamba_d_state", default=self.number("ssm_state_size", default=0))
        kernel = self.number("mamba_d_conv", default=self.number("conv_kernel", default=4))
        convolved = inner + 2 * groups * state
        return self.width * (2 * inner + convolved + heads) + convolved * (kernel + 1) + inner + 3 * heads

    def _mamba1(self) -> int:
        inner = self.number("mamba_expand", default=2) * self.width
        state, kernel = self.number("mamba_d_state", default=16), self.number("mamba_d_conv", default=4)
        is_auto = self.raw.get("mamba_dt_rank") == "auto"
        usual = math.ceil(self.width / 16)
        rank = usual if is_auto else self.number("mamba_dt_rank", default=usual, least=1)
        return 3 * self.width * inner + inner * (kernel + 1 + 2 * rank + 3 * state + 2)

    def _conv(self) -> int:
        return self.width * (4 * self.width + self.number("conv_L_cache", default=3))

    def mixer(self, kind: Mixer) -> int:
        """Parameters of a block's mixer of tokens."""
        counts: dict[Mixer, Callable[[], int]] = {
            "attention": self.attention, "delta": self._delta, "lightning": self._lightning, "mamba": self._mamba,
            "mamba1": self._mamba1, "conv": self._conv, "none": int,
        }  # fmt: skip
        return counts[kind]()

    @property
    def dense_width(self) -> int:
        """Width of a feed-forward without experts."""
        if self.kind == "granitemoehybrid":  # without experts it has only the shared part
            return self.number("shared_width")
        names = ("intermediate_size_mlp", "block_ff_dim", "intermediate_size")
        stated = next((size for name in names if (size := self.number(name, default=0))), 0)
        wide = stated or self.number("ffn_hidden_size", default=4 * self.width)
        if self.raw.get("block_auto_adjust_ff_dim"):
            multiple, share = self.number("block_multiple_of", default=256), self.raw.get("block_ffn_dim_multiplier", 1)
            wide = 2 * wide // 3
            if share is not None:
                wide = -(-int(share * wide) // multiple) * multiple
        return wide

    @property
    def expert_width(self) -> int:
        """Width of one expert."""
        return self.number("expert_width", default=0) or self.number("intermediate_size")

    @property
    def shared_width(self) -> int:
        """Width of the feed-forward that each token passes beside its experts; 0: none."""
        n_shared, each = self.number("shared", default=0), self.number("shared_width", default=0)
        if self.kind.startswith("llama4"):
            return self.number("intermediate_size")
        return each * max(1, n_shared) if each else n_shared * self.expert_width

    @property
    def n_experts(self) -> int:
        """Experts of a block that has experts."""
        return max(1, self.number("experts", default=1)) if "sparse" in self.feeds else 1

    @property
    def n_active(self) -> int:
        """Experts that a token passes."""
        return max(1, self.number("active", default=1)) if "sparse" in self.feeds else 1

    def feed(self, kind: Feed) -> int:
        """Parameters of a block's feed-forward."""
        matrices = 3 if self.gated else 2
        if kind == "none":
            return 0
        if kind == "dense":
            return matrices * self.width * self.dense_width
        one = matrices * self.width * self.expert_width
        biases = self.n_experts * (2 * self.expert_width + self.width) if self.kind == "gpt_oss" else 0
        shared = matrices * self.width * self.shared_width
        if self.kind == "granitemoehybrid":
            return self.n_experts * one + shared + self.width * self.n_experts
        return self.n_experts * one + biases + shared + self.width * self.n_experts

    def mean(self, of: Callable[[Mixer, Feed], float]) -> float:
        """The mean of a value over the blocks."""
        return sum(of(*block) for block in zip(self.mixers, self.feeds, strict=True)) / self.n_layers
