"""A Hugging Face configuration file as a model's shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from ....store.errors import UserError, reason
from ....store.foreign.regular_file import read_file
from .decoder import Decoder
from .fields import DESCRIBE, Fields, class_defaults
from .kinds import check_kinds
from .model_shape import ModelShape, checked
from .vision import OUTSIDE, vision_parameters

MAX_FILE_BYTES: Final = 1 << 20


def _decoder(fields: Fields, *, biased: bool = False, beside: int = 0, **more: Any) -> ModelShape:
    """Most of the older decoders.

    If it is `biased`, each matrix of a block has a bias, and each half a norm with one; `beside` are further parameters
    outside of blocks.
    """
    width, heads = fields.number("width", least=1), fields.number("heads", least=1)
    if width % heads and fields.raw.get("head_dim") is None:
        raise UserError(
            f"{fields.where}: a width of {width} cannot be divided among {heads} heads", "correct one, or give head_dim"
        )
    embedding_width = fields.number("embedding_width", default=width, least=1)
    given: dict[str, Any] = {
        "n_layers": fields.number("layers", least=1),
        "width": width,
        "n_heads": heads,
        "n_kv_heads": fields.number("kv_heads", default=heads, least=1),
        "head_width": fields.number("head_dim", default=max(1, width // heads), least=1),
        "ffn_width": fields.number("ffn", default=4 * width, least=1),
        "vocabulary": fields.number("vocab_size", least=1),
        "n_context": fields.number("context", default=2048, least=1),
        "embedding_width": embedding_width if embedding_width != width else 0,
        "assumed": ("n_context",),  # the longest that the model allows; training takes shorter ones
    }
    shape = checked(ModelShape(**{**given, **more}))
    if not biased:
        return shape
    in_block = shape.query_width + 2 * shape.kv_width + shape.ffn_width + 6 * width
    stated = shape.n_parameters + shape.n_layers * in_block + beside
    return checked(msgspec.structs.replace(shape, stated_parameters=stated))


def _modern(fields: Fields) -> ModelShape:
    """Recent decoders, whose blocks may differ: a shape of equal blocks with the parameters of all of them."""
    kind = str(fields.raw["model_type"])
    inner = fields.raw.get("text_config")
    text = {**fields.stated, **inner} if isinstance(inner, dict) else fields.stated
    known = class_defaults()
    named = text["model_type"] if text.get("model_type") in known else kind
    decoder = Decoder(fields.where, text, known[named].get("text_kind", named))
    given = [source.get(name) for name in ("tie_embedding", "tie_word_embeddings") for source in (fields.stated, text)]
    classes = (decoder.defaults, fields.defaults)  # a file may leave out the defaults of either class
    usual = all(one.get("tie_word_embeddings", True) for one in classes)
    tied = bool(next((one for one in given if one is not None), usual))
    vocabulary = decoder.number("vocab_size", least=1)
    outer = decoder.width * vocabulary * (1 if tied else 2)
    norms = decoder.width * (2 * decoder.n_layers + 1)
    in_mixers = decoder.n_layers * decoder.mean(lambda mixer, _: decoder.mixer(mixer))
    in_feeds = decoder.n_layers * decoder.mean(lambda _, feed: decoder.feed(feed))
    experts = decoder.n_active * decoder.expert_width if decoder.n_experts > 1 else 0
    met = {"none": 0, "dense": decoder.dense_width, "sparse": experts + decoder.shared_width if experts else 0}
    in_mean = decoder.mean(lambda _, feed: met[feed])
    each = min(decoder.expert_width, in_mean / decoder.n_active) if experts else in_mean
    in_images = 0
    if "vision" in fields.defaults:
        outer_too = {name: fields.stated[name] for name in OUTSIDE if name in fields.stated}
        stated = {**outer_too, **(fields.stated.get("vision_config") or {})}
        seen = Fields(f"{fields.where}, vision_config", stated, fields.defaults["vision"])
        in_images = vision_parameters(seen, kind, decoder.width)
    return checked(
        ModelShape(
            n_layers=decoder.n_layers,
            width=decoder.width,
            n_heads=decoder.n_heads,
            n_kv_heads=decoder.n_kv_heads,
            head_width=decoder.head_width,
            ffn_width=max(1, round(each)),
            gated=decoder.gated,
            n_experts=decoder.n_experts,
            n_active_experts=decoder.n_active,
            shared_ffn_width=round(in_mean - decoder.n_active * each),
            vocabulary=vocabulary,
            n_context=decoder.number("max_position_embeddings", default=2048, least=1),
            tied=tied,
            mixer_parameters=in_mixers / decoder.n_layers,
            stated_parameters=in_mixers + in_feeds + outer + norms + in_images,
            assumed=("n_context",),
        )
    )


def _biased(fields: Fields) -> ModelShape:
    norms = 2 * fields.number("width", least=1)
    return _decoder(fields, biased=True, beside=norms, tied=_tied(fields))


def _gpt(fields: Fields) -> ModelShape:
    norms = 2 * fields.number("width", least=1)
    kv_heads = 1 if fields.flag("multi_query", False) else fields.number("heads", least=1)
    return _decoder(fields, biased=True, beside=norms, tied=_tied(fields), learned_positions=True, n_kv_heads=kv_heads)


def _plain(fields: Fields) -> ModelShape:
    return _decoder(fields, tied=_tied(fields))


def _tied(fields: Fields) -> bool:
    """Whether embedding and head share their parameters."""
    return fields.flag("tie_word_embeddings", True)


def _mpt(fields: Fields) -> ModelShape:
    width = fields.number("width", least=1)
    ffn_width = fields.number("expansion_ratio", default=4, least=1) * width
    return _decoder(fields, tied=_tied(fields), ffn_width=ffn_width)


def _falcon(fields: Fields) -> ModelShape:
    kv_heads = 1 if fields.flag("multi_query", True) else fields.number("heads", least=1)
    if fields.flag("new_decoder_architecture", False):
        kv_heads = fields.number("kv_heads", default=fields.number("heads", least=1), least=1)
    return _decoder(fields, tied=_tied(fields), n_kv_heads=kv_heads)


def _task(fields: Fields) -> str:
    """The class in the file, whose name ends with the model's task; "": there is none."""
    named = fields.raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _bert(fields: Fields) -> ModelShape:
    """An encoder of words, with the head that its task has."""
    is_electra, task = fields.raw["model_type"] == "electra", _task(fields)
    width, vocabulary = fields.number("width", least=1), fields.number("vocab_size", least=1)
    words = fields.number("embedding_width", default=width, least=1)
    head = width * (width + 1)  # a pooler, or the first half of a classifier
    if task.endswith(("MaskedLM", "LMHeadModel", "CausalLM")) or not task:
        head = words * (width + 3) + vocabulary
    elif task.endswith("PreTraining"):
        head += width + 1 if is_electra else words * (width + 3) + vocabulary + 2 * (width + 1)
    elif task.endswith(("TokenClassification", "QuestionAnswering")) or (is_electra and task.endswith("Model")):
        head = 0
    places = fields.number("context", least=1)
    embedded = (fields.number("type_vocab_size", default=0) + 2) * words
    # with narrow words, the shape has their projection twice, and positions as wide as the blocks
    narrow = width - words * width - places * (width - words) if words != width else 0
    beside = embedded + narrow + head
    return _decoder(fields, biased=True, beside=beside, tied=True, learned_positions=True, causal=False)


def _vit(fields: Fields) -> ModelShape:
    """An encoder of images, with its classifier or pooler."""
    image, patch = fields.number("image_size", least=1), fields.number("patch_size", least=1)
    if patch > image:
        raise UserError(f"{fields.where}: patches of {patch} in images of {image} pixels", "correct one")
    width, labels = fields.number("width", least=1), fields.raw.get("id2label")
    n_labels = len(labels) if isinstance(labels, dict) and labels else fields.number("num_labels", default=2, least=1)
    head = n_labels if not _task(fields).endswith("Model") else width * (width + 1) - n_labels * width
    return _decoder(
        Fields(fields.where, {"vocab_size": n_labels, **fields.stated}, fields.defaults),
        biased=True,
        beside=(fields.number("channels", least=1) * patch**2 + 4) * width + head,
        n_context=(image // patch) ** 2 + 1,
        assumed=(),
        learned_positions=True,
        causal=False,
    )


def _t5(fields: Fields) -> ModelShape:
    """Encoder and decoder blocks; a decoder block has its attention twice."""
    width, heads = fields.number("width", least=1), fields.number("heads", least=1)
    n_encoder = fields.number("layers", least=1)
    n_decoder = fields.number("num_decoder_layers", default=n_encoder, least=1)
    return checked(
        ModelShape(
            n_layers=n_encoder + n_decoder,
            width=width,
            n_heads=heads,
            n_kv_heads=heads,
            head_width=fields.number("d_kv", default=max(1, width // heads), least=1),
            n_attentions=1 + n_decoder / (n_encoder + n_decoder),
            ffn_width=fields.number("d_ff", least=1),
            gated=str(fields.raw.get("feed_forward_proj", "relu")).startswith("gated"),
            vocabulary=fields.number("vocab_size", least=1),
            n_context=fields.number("context", default=512, least=1),
            tied=_tied(fields),
            causal=False,
            assumed=("n_context",),
        )
    )


READERS: Final[dict[str, Callable[[Fields], ModelShape]]] = {
    **dict.fromkeys(class_defaults(), _modern),
    **dict.fromkeys(("gpt2", "opt", "gpt_bigcode"), _gpt),
    **dict.fromkeys(("gptj", "phi"), _plain),
    **dict.fromkeys(("bloom", "gpt_neox", "starcoder2"), _biased),
    **dict.fromkeys(("bert", "roberta", "electra"), _bert),
    "mpt": _mpt,
    "falcon": _falcon,
    "vit": _vit,
    "t5": _t5,
}


def read_fields(path: Path) -> object:
    """The fields of a `config.json`; UserError if the file is none."""
    remedy = "give a model's config.json"
    if path.is_dir():
        raise UserError(f"{path} is a folder", f"name a file in it: {path / 'config.json'}")
    try:
        return json.loads(read_file(path, MAX_FILE_BYTES).decode("utf-8-sig"))  # it takes Infinity, which Python writes
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}", remedy) from error
    except RecursionError as error:
        raise UserError(f"{path} nests deeper than a configuration does", remedy) from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}", remedy) from error


def read_config(path: Path) -> ModelShape:
    """The shape that a `config.json` describes; raises as `from_config` and `read_fields`."""
    return from_config(read_fields(path), str(path))


def from_config(raw: object, where: str) -> ModelShape:
    """The shape that a configuration's fields describe; `where` names it in messages.

    Raises:
        UserError: it is no configuration, or of an unknown architecture.
    """
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(kind, str):
        raise UserError(f"{where} names no model_type", f"give a model's config.json, or {DESCRIBE}")
    if kind not in READERS:
        raise UserError(
            f"{where} is of the architecture {kind!r}, which is not known here",
            f"pip install 'zerotune[models]', whose class counts it; or {DESCRIBE}; "
            "or name with model_type one that is built alike, with num_experts, num_experts_per_tok, "
            "n_shared_experts and moe_intermediate_size for experts, kv_lora_rank and q_lora_rank for latent ranks; "
            f"known are {', '.join(sorted(READERS))}",
        )
    check_kinds(where, raw)
    return READERS[kind](Fields(where, raw, class_defaults()[kind]))
