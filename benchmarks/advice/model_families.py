"""Renew `tuner/advice/models/families.json`: what transformers' classes assume where a configuration is silent.

Needs transformers. Of each family the fields that `decoder.py` reads are kept, if the class gives them a value.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from zerotune.tuner.advice.models import decoder

FAMILIES = (
    "apertus", "arcee", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3", "gemma3_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granite", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "helium", "internvl", "jamba", "kimi_linear", "lfm2", "llama",
    "llama4", "llama4_text", "minimax", "minimax_m2", "ministral3", "mistral", "mistral3", "mixtral",
    "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_moe",
    "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
    "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
)  # fmt: skip
OLD_NAMES = {"kimi_k2": "deepseek_v3", "minimax_text_01": "minimax", "minimax_m1": "minimax", "internlm2": "llama"}
"""Families whose files come with code of their own, and whose fields are those of another."""
OUT = Path(decoder.__file__).with_name("families.json")
NEVER = {"num_hidden_layers", "hidden_size", "layers_block_type", "mlp_layer_types", "model_type"}
"""Said by every file, or made from what others say."""


def fields_read() -> set[str]:
    """The names of fields that stand in decoder.py."""
    return set(re.findall(r'"([a-z][a-zA-Z0-9_]+)"', Path(decoder.__file__).read_text())) - NEVER


def defaults_of(config: Any, wanted: set[str]) -> dict[str, Any]:
    """What the class assumes of these fields, whatever the others are."""
    text = config.get_text_config()
    wider = type(text)(hidden_size=2 * text.hidden_size, num_attention_heads=4 * text.num_attention_heads).to_dict()
    found = {
        name: value
        for name, value in text.to_dict().items()
        if name in wanted and value not in (None, [], {}) and wider[name] == value
    }
    if "num_attention_heads" in wanted:
        found["num_attention_heads"] = text.num_attention_heads
    if text is not config:
        found["text_kind"] = text.model_type
    found["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", True))
    return {name: value for name, value in found.items() if not isinstance(value, (list, dict))}


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    wanted = fields_read() | {"vocab_size", "max_position_embeddings"}
    families = {kind: defaults_of(CONFIG_MAPPING[kind](), wanted) for kind in FAMILIES if kind in CONFIG_MAPPING}
    families |= {old: families[new] for old, new in OLD_NAMES.items()}
    lines = (f"{json.dumps(kind)}: {json.dumps(told, sort_keys=True)}" for kind, told in sorted(families.items()))
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
