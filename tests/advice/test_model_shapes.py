"""Models as users describe them: numbers, Hugging Face configurations, modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zerotune.store.errors import UserError
from zerotune.tuner.advice.models.huggingface import from_config, read_config
from zerotune.tuner.advice.models.meta_module import inspect, shape_of, shape_of_config
from zerotune.tuner.advice.models.model_shape import from_dimensions, from_parameters
from zerotune.tuner.offline.advise.document import model_shape

# Published sizes: meta-llama/Llama-2-7b, openai-community/gpt2-xl, mistralai/Mixtral-8x7B, bigscience/bloom-7b1,
# tiiuae/falcon-7b, EleutherAI/gpt-neox-20b, google-t5/t5-3b, google/vit-large-patch16-224, google-bert/bert-large,
# Qwen/Qwen1.5-MoE-A2.7B, facebook/opt-350m, google/electra-small-discriminator.
CONFIGS = {
    "llama": ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
               "vocab_size": 32000, "max_position_embeddings": 4096}, 6.74e9),
    "gpt2": ({"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}, 1.56e9),
    "mixtral": ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000},
                46.7e9),
    "bloom": ({"n_embed": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880}, 7.07e9),
    "falcon": ({"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024}, 6.92e9),
    "gpt_neox": ({"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64, "intermediate_size": 24576,
                  "vocab_size": 50432}, 20.6e9),
    "t5": ({"d_model": 1024, "num_layers": 24, "num_heads": 32, "d_kv": 128, "d_ff": 16384, "vocab_size": 32128},
           2.85e9),
    "vit": ({"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
            0.304e9),
    "bert": ({"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
              "vocab_size": 30522, "max_position_embeddings": 512}, 0.335e9),
    "qwen2_moe": ({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 5632,
                   "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
                   "num_experts_per_tok": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936},
                  14.3e9),
    "opt": ({"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096,
             "word_embed_proj_dim": 512, "vocab_size": 50272, "max_position_embeddings": 2048}, 0.331e9),
    "electra": ({"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 1024,
                 "embedding_size": 128, "vocab_size": 30522, "max_position_embeddings": 512}, 13.5e6),
}  # fmt: skip


PUBLISHED = json.loads((Path(__file__).parents[2] / "benchmarks" / "field" / "published_models.json").read_text())


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 64)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(64, 4, 256) for _ in range(6))


@pytest.mark.parametrize("case", PUBLISHED, ids=[case["name"] for case in PUBLISHED])
def test_published_models_have_their_published_parameters(case):
    shape = from_config(case["config"], case["name"])
    assert shape.n_parameters == pytest.approx(case["n_parameters"], rel=1e-3)
    assert shape.n_layers * shape.active_block_parameters + shape.outer_parameters <= 1.05 * shape.n_parameters


WRONG_KINDS = [
    ("google/gemma-2-9b", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ("ai21labs/Jamba-v0.1", {"attn_layer_period": "8"}, "attn_layer_period"),
    ("ai21labs/Jamba-v0.1", {"expert_layer_period": None}, "expert_layer_period"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": "4"}, "full_attention_interval"),
    ("Qwen/Qwen3-8B", {"layer_types": "x"}, "layer_types"),
    ("Qwen/Qwen3-30B-A3B", {"moe_intermediate_size": None}, "moe_intermediate_size"),
    ("MiniMaxAI/MiniMax-Text-01", {"attn_type_list": [0, 1]}, "attn_type_list"),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", {"num_hidden_layers": 30}, "pattern"),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", {"hybrid_override_pattern": 5}, "hybrid_override_pattern"),
    ("Qwen/Qwen3-VL-8B-Instruct", {"vision_config": {"hidden_size": "1152", "depth": 27}}, "hidden_size"),
    ("OpenGVLab/InternVL3-8B-hf", {"vision_config": {"image_size": [448, 336]}}, "image_size"),
    *(("OpenGVLab/InternVL3-8B-hf", {"downsample_ratio": one}, "downsample_ratio") for one in (0, None, 1e-200)),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
    ("Qwen/Qwen3-8B", {"model_type": "kimi_linear"}, "layer_types"),
    (
        "Qwen/Qwen3-VL-8B-Instruct",
        {"vision_config": {"hidden_size": 1152, "depth": 27, "deepstack_visual_indexes": 5}},
        "deepstack_visual_indexes",
    ),
    ("google/gemma-3-4b-pt", {"text_config": {"model_type": []}}, "model_type"),
    ("LiquidAI/LFM2-350M", {"block_ffn_dim_multiplier": "4096"}, "block_ffn_dim_multiplier"),
    ("LiquidAI/LFM2-350M", {"block_ffn_dim_multiplier": []}, "block_ffn_dim_multiplier"),
]


@pytest.mark.parametrize(("name", "more", "named"), WRONG_KINDS)
def test_a_field_of_another_kind_is_refused_by_its_name(name: str, more: dict[str, object], named: str) -> None:
    config = next(case["config"] for case in PUBLISHED if case["name"] == name)
    with pytest.raises(UserError, match=named):
        from_config({**config, **more}, "c")


JAMBA_LARGE = {
    "hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 72, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2, "mamba_dt_rank": 512, "vocab_size": 65536,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more", "n_active"),
    [("ai21labs/Jamba-v0.1", {}, 12e9), ("ai21labs/Jamba-v0.1", JAMBA_LARGE, 94e9),
     ("Qwen/Qwen3-30B-A3B", {}, 3.3e9), ("deepseek-ai/DeepSeek-V3", {}, 37e9), ("openai/gpt-oss-120b", {}, 5.1e9)],
)  # fmt: skip
def test_a_token_meets_as_many_parameters_as_published(name: str, more: dict[str, object], n_active: float) -> None:
    shape = from_config(next(case["config"] for case in PUBLISHED if case["name"] == name) | more, "c")
    active = shape.n_layers * shape.active_block_parameters + shape.outer_parameters
    assert active == pytest.approx(n_active, rel=0.13)  # outer ones are counted by some


@pytest.mark.parametrize(("before", "more"), [("", {"time_step_limit": [0.0, float("inf")]}), ("\ufeff", {})])
def test_json_as_python_and_editors_write_it_is_read(before: str, more: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(before + json.dumps({"model_type": "llama", **CONFIGS["llama"][0], **more}), encoding="utf-8")
    assert read_config(path).n_parameters == pytest.approx(6.74e9, rel=0.01)


@pytest.mark.slow
def test_transformers_counts_what_our_reader_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library: a class with a block that only it knows."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        "class Config:\n"
        "    def __init__(self, **fields): self.model_type = fields['model_type']\n"
        "    def get_text_config(self): return self\n"
        "    def to_dict(self): return {'model_type': self.model_type}\n"
        "class PreTrainedModel(torch.nn.Module): pass\n"
        "class AutoConfig:\n"
        "    for_model = Config\n"
        "class AutoModelForCausalLM:\n"
        "    def from_config(config):\n"
        "        model = PreTrainedModel()\n"
        "        model.config = config\n"
        "        model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))\n"
        "        return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **CONFIGS["llama"][0], "layer_types": ["of_tomorrow"] * 32}))
    assert shape_of_config(path).n_parameters == 4 * 65 * 64
    path.write_text(json.dumps({"layer_types": ["of_tomorrow"]}))
    with pytest.raises(UserError, match="model_type"):
        shape_of_config(path)


def test_an_unknown_model_is_told_which_options_describe_it(tmp_path):
    with pytest.raises(UserError, match=r"--layers.*num_experts.*n_shared_experts.*kv_lora_rank"):
        from_config({"model_type": "of_tomorrow"}, "c")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "{}", '{"model_type": 3}', '{"model_type": "rwkv"}', '{"model_type": "llama"}',
     '{"model_type": "llama", "hidden_size": 0, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 1}',
     '{"model_type": "llama", "hidden_size": "x", "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 1}',
     "[" * 100_000,
     json.dumps({"model_type": "llama", **CONFIGS["llama"][0], "layer_types": ["full_attention"]}),
     json.dumps({"model_type": "llama", **CONFIGS["llama"][0], "layer_types": ["nonsense"] * 32}),
     json.dumps({"model_type": "llama", **CONFIGS["llama"][0], "num_hidden_layers": 10**9}),
     '{"model_type": "vit", "image_size": 8, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}'],
)  # fmt: skip
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError):
        read_config(path)


@pytest.mark.parametrize("parameters", [1.2e8, 1.5e9, 7e9, 175e9, 1e12])
def test_a_size_becomes_a_shape_of_that_size(parameters):
    shape = from_parameters(parameters)
    assert shape.n_parameters == pytest.approx(parameters)
    assert shape.n_layers * shape.active_block_parameters == pytest.approx(parameters, rel=0.4)
    assert "n_layers" in shape.assumed


def test_numbers_that_contradict_each_other_are_refused():
    assert from_dimensions(48, 1600, 25, 1024, 50257, 1.5e9).n_layers == 48
    with pytest.raises(UserError):
        from_dimensions(48, 1600, 25, 1024, 50257, 7e9)
    with pytest.raises(UserError):
        from_dimensions(48, 1600, 24)
    with pytest.raises(UserError):
        from_dimensions(0, 1600, 25)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_words_that_are_more_than_the_model_are_refused(kind, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **CONFIGS[kind][0]}))
    assert model_shape(str(path), None, None, None, None, 1000).vocabulary == 1000
    with pytest.raises(UserError):
        model_shape(str(path), None, None, None, None, 10**16)


def test_a_module_is_counted_on_the_meta_device():
    with torch.device("meta"):
        model = Blocks()
    shape = inspect(model)
    assert (shape.n_layers, shape.width) == (6, 64)
    assert shape.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match="blocks"):
        inspect(torch.nn.Linear(2, 2, device="meta"))


def test_a_modules_path_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\ndef model():\n    return torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(5)])\n"
    )
    shape = shape_of("mine:model")
    assert (shape.n_layers, shape.width, shape.n_parameters) == (5, 256, 5 * (256 * 256 + 256))
    with pytest.raises(UserError):
        shape_of("nobody.knows:it")
