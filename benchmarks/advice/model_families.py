"""Renew `tuner/advice/models/families.json`: the defaults of transformers' classes for missing fields.

Needs transformers. A field is kept if the class gives it a value that does not depend on other fields. A list with an
entry for each layer is kept as the unit that repeats; [] has no unit.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from zerotune.tuner.advice.models import decoder, fields, huggingface, vision

FAMILIES = (
    "apertus", "arcee", "bert", "bloom", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "dots1", "electra", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo", "gemma",
    "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "helium", "internvl", "jamba", "kimi_linear", "lfm2", "llama", "llama4", "llama4_text", "minimax", "minimax_m2",
    "ministral3", "mistral", "mistral3", "mixtral", "mpt", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "phi", "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "roberta",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "t5", "vit",
)  # fmt: skip
OLD_NAMES = {"kimi_k2": "deepseek_v3", "minimax_text_01": "minimax", "minimax_m1": "minimax", "internlm2": "llama"}
"""Families whose files come with their own code, and the family whose fields they use."""
OUT = Path(decoder.__file__).with_name("families.json")
NEVER = {
    *fields.SPELLINGS["layers"], *fields.SPELLINGS["width"], "num_decoder_layers", "layer_types", "layers_block_type",
    "mlp_layer_types", "model_type", "architectures", "id2label",
}  # fmt: skip
"""Every file has these fields, or they follow from others."""
N_PROBED = 24
"""Layers of the model whose lists are searched for a repeating unit."""


def names_in(*modules: ModuleType) -> set[str]:
    return {
        name for one in modules for name in re.findall(r'"([a-z][a-zA-Z0-9_]+)"', Path(str(one.__file__)).read_text())
    }


def defaults_of(text: Any, wanted: set[str]) -> dict[str, Any]:
    """Defaults of the `wanted` fields that do not depend on other fields."""
    kind = type(text)
    told, more = kind(), {"num_hidden_layers": N_PROBED}
    wider = kind(hidden_size=2 * told.hidden_size, num_attention_heads=4 * told.num_attention_heads, **more).to_dict()
    found = {
        name: value
        for name, value in told.to_dict().items()
        if name in wanted and value is not None and wider[name] == value and not isinstance(value, (list, dict))
    }
    heads = next(name for name in fields.SPELLINGS["heads"] if name in wider)
    types, feeds = wider.get("layer_types") or [], wider.get("mlp_layer_types")
    if len(types) == N_PROBED and any(decoder.MIXERS.get(one) != "attention" for one in types):
        units = (types[:n] for n in range(1, N_PROBED // 2 + 1))
        found["layer_types"] = next((unit for unit in units if (unit * N_PROBED)[:N_PROBED] == types), [])
    if feeds:
        found["first_k_dense_replace"] = feeds.index("sparse")
    if hasattr(told, "tie_word_embeddings"):
        found["tie_word_embeddings"] = told.tie_word_embeddings
    return {**found, heads: told.num_attention_heads}


def family_of(config: Any) -> dict[str, dict[str, Any]]:
    """A class's entry, and the entry of the text model within it, if there is one."""
    text, wanted = config.get_text_config(), names_in(decoder, fields, huggingface) - NEVER
    families = {text.model_type: defaults_of(text, wanted)}
    if text is not config:
        seen = {**config.to_dict(), **type(config.vision_config)().to_dict()}
        names = names_in(vision).union(fields.SPELLINGS["vision_layers"], fields.SPELLINGS["channels"])
        images = {name: seen[name] for name in names if seen.get(name) is not None}
        tied = bool(getattr(config, "tie_word_embeddings", True))
        families[config.model_type] = {"text_kind": text.model_type, "tie_word_embeddings": tied, "vision": images}
    return families


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    families: dict[str, dict[str, Any]] = {}
    for kind in FAMILIES:
        families |= family_of(CONFIG_MAPPING[kind]())
    families |= {old: families[new] for old, new in OLD_NAMES.items()}
    lines = (f"{json.dumps(kind)}: {json.dumps(told, sort_keys=True)}" for kind, told in sorted(families.items()))
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
