"""Small models of the transformers library, of a few million random parameters, as loads to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

N_TOKENS: Final = 1024
"""Of the vocabulary."""
WIDTH: Final = 256
_IMAGE, _PATCH = 96, 8


@dataclass(frozen=True)
class TransformerLoad:
    """A model by its architecture, and its batch; torch and transformers are imported where these are made."""

    architecture: str
    batch: int = 4
    n_context: int = 128
    """Tokens per row; ViT has a patch for each, and one more."""

    @property
    def tokens_per_step(self) -> int:
        """What one rank trains on in one step."""
        return self.batch * self.n_context

    def model(self) -> Any:
        """The model, in fp32, the same on all ranks that set the same seed."""
        return _MAKERS[self.architecture](self.n_context)

    def draw(self) -> Any:
        """A random batch: the model's arguments by name."""
        import torch

        if self.architecture == "vit":
            shape = (self.batch, 3, _IMAGE, _IMAGE)
            return {"pixel_values": torch.randn(shape), "labels": torch.randint(10, (self.batch,))}
        tokens = torch.randint(N_TOKENS, (self.batch, self.n_context))
        return {"input_ids": tokens, "labels": tokens}

    def loss(self, model: Any, batch: Any) -> Any:
        """The model's own loss."""
        return model(**batch).loss

    def layers(self, model: Any) -> list[Any]:
        """What FSDP2 shards one by one: what zero_runtime takes for layers by default."""
        from zerotune.zero_runtime.layout.discovery import default_layers

        return default_layers(model)


def _llama(n_context: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_shape(), num_key_value_heads=2, max_position_embeddings=n_context))


def _gpt2(n_context: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape: dict[str, Any] = {"n_positions": n_context, "n_embd": WIDTH, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=N_TOKENS, **shape, **dropouts))


def _mixtral(n_context: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(**_shape(), num_key_value_heads=2, max_position_embeddings=n_context, **experts)
    return MixtralForCausalLM(config)


def _t5(n_context: int) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    shape: dict[str, Any] = {"d_model": WIDTH, "d_kv": WIDTH // 4, "d_ff": 3 * WIDTH, "num_layers": 4, "num_heads": 4}
    tokens: dict[str, Any] = {"vocab_size": N_TOKENS, "decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**shape, **tokens, dropout_rate=0.0))


def _vit(n_context: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {name: value for name, value in _shape().items() if name != "vocab_size"}
    dropouts: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    images: dict[str, Any] = {"image_size": _IMAGE, "patch_size": _PATCH, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**shape, **images, **dropouts))


def _shape() -> dict[str, Any]:
    return {
        "vocab_size": N_TOKENS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }  # fmt: skip


_MAKERS: Final = {"llama": _llama, "gpt2": _gpt2, "mixtral": _mixtral, "t5": _t5, "vit": _vit}
TRANSFORMERS: Final = {
    **{name: TransformerLoad(name) for name in ("llama", "gpt2", "mixtral", "t5")},
    "vit": TransformerLoad("vit", n_context=(_IMAGE // _PATCH) ** 2),
}
"""Loads by name."""
