"""A Hugging Face configuration file as a model's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from zerotune.store.errors import UserError, reason
from zerotune.store.foreign.regular_file import read_file
from zerotune.tuner.advice.models.decoder import Decoder, class_defaults
from zerotune.tuner.advice.models.kinds import check_kinds
from zerotune.tuner.advice.models.model_shape import ModelShape, checked
from zerotune.tuner.advice.models.vision import vision_parameters


class UnknownArchitecture(UserError):
    """A configuration of a kind that is not known here."""


MAX_FILE_BYTES: Final = 1 << 20


class _Fields:
    """The file's numbers; a missing or impossible one is a user's mistake that names it."""

    def __init__(self, where: str, raw: Mapping[str, Any]) -> None:
        self.where, self.raw = where, raw

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of the names that is there."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{self.where}: {name} is {value!r}", "it must be a whole number from 1 on")
            return value
        if default is None:
            raise UserError(f"{self.where} has no {names[0]}", "give a complete configuration file")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Whether something is on."""
        value = self.raw.get(name)
        return default if value is None else bool(value)

    def tied(self, default: bool) -> bool:
        """Whether the embedding is the head, too."""
        return self.flag("tie_word_embeddings", default)


def _decoder(fields: _Fields, **more: Any) -> ModelShape:
    """Most of them: the names that Llama's configuration made usual."""
    width = fields.count("hidden_size", "n_embd", "d_model", "n_embed")
    heads = fields.count("num_attention_heads", "n_head", "n_heads")
    if width % heads and fields.raw.get("head_dim") is None:
        raise UserError(
            f"{fields.where}: a width of {width} cannot be divided among {heads} heads", "correct one, or give head_dim"
        )
    embedding_width = fields.count("word_embed_proj_dim", "embedding_size", default=width)
    given: dict[str, Any] = {
        "n_layers": fields.count("num_hidden_layers", "n_layer", "n_layers"),
        "width": width,
        "n_heads": heads,
        "n_kv_heads": fields.count("num_key_value_heads", "num_kv_heads", default=heads),
        "head_width": fields.count("head_dim", default=max(1, width // heads)),
        "ffn_width": fields.count("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * width),
        "vocabulary": fields.count("vocab_size"),
        "n_context": fields.count("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", default=2048),
        "embedding_width": embedding_width if embedding_width != width else 0,
        "assumed": ("n_context",),  # the longest that the model allows; training takes shorter ones
    }
    return checked(ModelShape(**{**given, **more}))


def _modern(fields: _Fields) -> ModelShape:
    """Decoders of today, whose blocks may differ: a shape of equal blocks with the parameters of all of them."""
    kind = str(fields.raw["model_type"])
    text = fields.raw.get("text_config")
    text = {**fields.raw, **text} if isinstance(text, dict) else fields.raw
    known = class_defaults()[kind]
    text_kind = str(text["model_type"]) if text.get("model_type") in class_defaults() else kind
    if text_kind == kind:
        text_kind = str(known.get("text_kind", kind))
    decoder = Decoder(fields.where, text, text_kind)
    said = [source.get(name) for name in ("tie_embedding", "tie_word_embeddings") for source in (fields.raw, text)]
    tied = bool(next((one for one in said if one is not None), known["tie_word_embeddings"]))
    vocabulary = decoder.number("vocab_size", least=1)
    outer = decoder.width * vocabulary * (1 if tied else 2)
    norms = decoder.width * (2 * decoder.n_layers + 1)
    in_mixers = decoder.n_layers * decoder.mean(lambda mixer, _: decoder.mixer(mixer))
    in_feeds = decoder.n_layers * decoder.mean(lambda _, feed: decoder.feed(feed))
    experts = decoder.n_active * decoder.expert_width if decoder.n_experts > 1 else 0
    met = {"none": 0, "dense": decoder.dense_width, "sparse": experts + decoder.shared_width if experts else 0}
    beside = decoder.mean(lambda _, feed: met[feed]) - experts
    seen = fields.raw.get("vision_config")
    in_images = vision_parameters(fields.where, seen, kind, decoder.width) if isinstance(seen, dict) else 0
    return checked(
        ModelShape(
            n_layers=decoder.n_layers,
            width=decoder.width,
            n_heads=decoder.n_heads,
            n_kv_heads=decoder.n_kv_heads,
            head_width=decoder.head_width,
            ffn_width=decoder.expert_width if experts else max(1, round(decoder.mean(lambda _, feed: met[feed]))),
            gated=decoder.gated,
            n_experts=decoder.n_experts,
            n_active_experts=decoder.n_active,
            shared_ffn_width=max(0, round(beside)) if experts else 0,
            vocabulary=vocabulary,
            n_context=decoder.number("max_position_embeddings", default=2048, least=1),
            tied=tied,
            mixer_parameters=in_mixers / decoder.n_layers,
            stated_parameters=in_mixers + in_feeds + outer + norms + in_images,
            assumed=("n_context",),
        )
    )


def _gpt(fields: _Fields) -> ModelShape:
    return _decoder(fields, tied=fields.tied(True), learned_positions=True)


def _bigcode(fields: _Fields) -> ModelShape:
    kv_heads = {"n_kv_heads": 1} if fields.flag("multi_query", default=True) else {}
    return _decoder(fields, tied=fields.tied(True), learned_positions=True, **kv_heads)


def _plain(fields: _Fields) -> ModelShape:
    return _decoder(fields, tied=fields.tied(False))


def _tied(fields: _Fields) -> ModelShape:
    return _decoder(fields, tied=fields.tied(True))


def _mpt(fields: _Fields) -> ModelShape:
    width = fields.count("d_model")
    return _decoder(fields, tied=fields.tied(True), ffn_width=fields.count("expansion_ratio", default=4) * width)


def _falcon(fields: _Fields) -> ModelShape:
    kv_heads = 1 if fields.flag("multi_query", default=True) else None
    if fields.flag("new_decoder_architecture", default=False):
        kv_heads = fields.count("num_kv_heads")
    return _decoder(fields, tied=fields.tied(True), **({"n_kv_heads": kv_heads} if kv_heads else {}))


def _bert(fields: _Fields) -> ModelShape:
    return _decoder(fields, tied=fields.tied(True), learned_positions=True, causal=False)


def _vit(fields: _Fields) -> ModelShape:
    image, patch = fields.count("image_size", default=224), fields.count("patch_size", default=16)
    if patch > image:
        raise UserError(f"{fields.where}: patches of {patch} in images of {image} pixels", "correct one")
    labels = fields.raw.get("id2label")
    n_labels = len(labels) if isinstance(labels, dict) and labels else 1000
    return _decoder(
        _Fields(fields.where, {"vocab_size": n_labels, **fields.raw}),
        n_context=(image // patch) ** 2 + 1,
        assumed=(),
        learned_positions=True,
        causal=False,
    )


def _t5(fields: _Fields) -> ModelShape:
    """Encoder and decoder blocks; a decoder block has its attention twice."""
    width, heads = fields.count("d_model"), fields.count("num_heads")
    n_encoder = fields.count("num_layers")
    n_decoder = fields.count("num_decoder_layers", default=n_encoder)
    return checked(
        ModelShape(
            n_layers=n_encoder + n_decoder,
            width=width,
            n_heads=heads,
            n_kv_heads=heads,
            head_width=fields.count("d_kv", default=max(1, width // heads)),
            n_attentions=1 + n_decoder / (n_encoder + n_decoder),
            ffn_width=fields.count("d_ff"),
            gated=str(fields.raw.get("feed_forward_proj", "relu")).startswith("gated"),
            vocabulary=fields.count("vocab_size"),
            n_context=fields.count("n_positions", default=512),
            tied=fields.tied(True),
            causal=False,
            assumed=("n_context",),
        )
    )


READERS: Final[dict[str, Callable[[_Fields], ModelShape]]] = {
    **dict.fromkeys(class_defaults(), _modern),
    **dict.fromkeys(("gpt2", "opt"), _gpt),
    **dict.fromkeys(("gpt_neox", "gptj", "phi"), _plain),
    **dict.fromkeys(("bloom", "starcoder2"), _tied),
    **dict.fromkeys(("bert", "roberta", "electra"), _bert),
    "gpt_bigcode": _bigcode,
    "mpt": _mpt,
    "falcon": _falcon,
    "vit": _vit,
    "t5": _t5,
}
"""By `model_type`."""


def read_config(path: Path) -> ModelShape:
    """The shape that a `config.json` describes.

    Raises:
        UserError: it cannot be read, is no such file, or of an architecture that is not known here.
    """
    try:
        raw = msgspec.json.decode(read_file(path, MAX_FILE_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}", "give a model's config.json") from error
    except RecursionError as error:
        raise UserError(f"{path} nests deeper than a configuration does", "give a model's config.json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no JSON: {error}", "give a model's config.json") from error
    return from_config(raw, str(path))


def from_config(raw: object, where: str) -> ModelShape:
    """The shape that a configuration's fields describe; `where` names it in messages.

    Raises:
        UserError: it is no configuration, or of an architecture that is not known here.
    """
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(kind, str):
        raise UserError(f"{where} names no model_type", "give a model's config.json, or --layers and --hidden")
    if kind not in READERS:
        raise UnknownArchitecture(
            f"{where} is of the architecture {kind!r}, which is not known here",
            "pip install 'zerotune[models]', whose class counts it; or give --layers, --hidden, --heads, --sequence; "
            "or name with model_type one that is built alike, with num_experts, num_experts_per_tok, "
            "n_shared_experts and moe_intermediate_size for experts, kv_lora_rank and q_lora_rank for latent ranks; "
            f"known are {', '.join(sorted(READERS))}",
        )
    check_kinds(where, raw)
    return READERS[kind](_Fields(where, raw))
