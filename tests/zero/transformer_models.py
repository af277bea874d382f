"""Tiny models of the transformers library with random weights; it is imported where one is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

N_TOKENS = 61
SHAPE = {"vocab_size": N_TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
         "num_attention_heads": 4}  # fmt: skip


def _llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, max_position_embeddings=32, **more))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"vocab_size": N_TOKENS, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**shape, **dropouts))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_key_value_heads=2, max_position_embeddings=32, **experts))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"vocab_size": N_TOKENS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**shape, image_size=8, patch_size=4, num_labels=3, **dropouts))


def text_batch(rank: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(N_TOKENS, (2, 12), generator=draw)
    return {"input_ids": tokens, "labels": tokens}


def image_batch(rank: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return {
        "pixel_values": torch.randn(2, 3, 8, 8, generator=draw),
        "labels": torch.randint(3, (2,), generator=draw),
    }


def _made(make: Callable[[], nn.Module], recompute: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(7)
        model = make().train()
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return build


_MAKERS = {
    "llama": (_llama, text_batch),
    "llama-tied": (lambda: _llama(tie_word_embeddings=True), text_batch),
    "gpt2": (_gpt2, text_batch),
    "mixtral": (_mixtral, text_batch),
    "t5": (_t5, text_batch),
    "vit": (_vit, image_batch),
}
TRANSFORMERS = {
    name + "-recomputed" * recompute: (_made(make, recompute), batch)
    for name, (make, batch) in _MAKERS.items()
    for recompute in (False, True)
}
