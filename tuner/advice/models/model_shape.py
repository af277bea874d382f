"""Shapes of models, which determine memory and time."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from ....store.errors import UserError

ASPECT: Final = 100
"""Width over layers of a model with only a known size; Kaplan et al. 2020, arXiv:2001.08361, section 3.1:
the loss hardly depends on it between 30 and 300."""
HEAD_WIDTH: Final = 128
_WIDTH_STEP: Final = 1024
"""Step of large models' widths, so that eight ranks can share the heads."""
VOCABULARY: Final = 50257
"""Vocabulary of GPT-2."""
CONTEXT: Final = 2048
MAX_PARAMETERS: Final = 1e18
_WORDS: Final = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
_TOLERANCE: Final = 0.1
"""Share by which the stated number of parameters may differ from the shape's."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer of equal blocks.

    `ffn_width` is one expert's; `gated`: its feed-forward has three matrices instead of two. `n_layers` counts encoder
    blocks too, if there is an encoder.
    """

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_width: int
    ffn_width: int
    gated: bool = False
    n_experts: int = 1
    n_active_experts: int = 1
    shared_ffn_width: int = 0
    """Width of a feed-forward that every token passes beside its experts."""
    n_attentions: float = 1.0
    """Mean attentions per block: decoder blocks beside an encoder have two."""
    vocabulary: int = VOCABULARY
    embedding_width: int = 0
    """Width of embedding and head if they are narrower than blocks; 0: as wide."""
    n_context: int = CONTEXT
    tied: bool = True
    """Embedding and head share their parameters."""
    learned_positions: bool = False
    causal: bool = True
    mixer_parameters: float | None = None
    """Mean parameters of a block's attention, if they do not follow from the widths; None: they do."""
    stated_parameters: float | None = None
    """Parameters counted from the real model, if known."""
    assumed: tuple[str, ...] = ()

    @property
    def query_width(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of the keys of all key-value heads; values have the same."""
        return self.n_kv_heads * self.head_width

    @property
    def attention_parameters(self) -> float:
        """Parameters of one block's projections."""
        usual = self.n_attentions * self.width * (2 * self.query_width + 2 * self.kv_width)
        return usual if self.mixer_parameters is None else self.mixer_parameters

    @property
    def active_ffn_width(self) -> int:
        """Width of all feed-forwards of one block that one token passes."""
        return self.n_active_experts * self.ffn_width + self.shared_ffn_width

    @property
    def words_width(self) -> int:
        """Width of embedding and head."""
        return self.embedding_width or self.width

    def _ffn_parameters(self, ffn_width: int) -> int:
        return (3 if self.gated else 2) * self.width * ffn_width

    @property
    def block_parameters(self) -> float:
        """Parameters of one block without norms and biases."""
        if self.stated_parameters is not None:
            return (self.stated_parameters - self.outer_parameters) / self.n_layers
        return self.attention_parameters + self._ffn_parameters(self.n_experts * self.ffn_width + self.shared_ffn_width)

    @property
    def active_block_parameters(self) -> float:
        """Parameters that one token passes in one block."""
        return self.attention_parameters + self._ffn_parameters(self.active_ffn_width)

    @property
    def outer_parameters(self) -> int:
        """Parameters of embeddings and head."""
        positions = self.n_context if self.learned_positions else 0
        projections = 2 * self.embedding_width * self.width  # of narrow embeddings to blocks, and back
        return self.vocabulary * (1 if self.tied else 2) * self.words_width + positions * self.width + projections

    @property
    def n_parameters(self) -> float:
        """Parameters of the whole model."""
        return self.n_layers * self.block_parameters + self.outer_parameters

    def model_flops_per_token(self) -> float:
        """Forward and backward without recomputation: 6 per multiplying parameter, 12 per layer, width and context.

        Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B: causal attention counts fully, too.
        """
        multiplied = self.n_layers * self.active_block_parameters + self.vocabulary * self.words_width
        return 6.0 * multiplied + 3.0 * self.n_layers * self.attention_flops_per_token

    @property
    def attention_flops_per_token(self) -> float:
        """Attention's operations in one block's forward, without the projections."""
        return 4.0 * self.n_attentions * self.query_width * self.n_context


def checked(shape: ModelShape) -> ModelShape:
    """The shape itself; UserError if a number is below one, or two of them contradict each other."""
    for name in ("n_layers", "width", "n_heads", "n_kv_heads", "head_width", "ffn_width", "vocabulary", "n_context"):
        if getattr(shape, name) < 1:
            raise UserError(f"the model's {name} is {getattr(shape, name)}", "give 1 or more")
    if shape.n_heads % shape.n_kv_heads:
        raise UserError(
            f"{shape.n_heads} heads cannot share {shape.n_kv_heads} key-value heads", "give a divisor of the heads"
        )
    if not 1 <= shape.n_active_experts <= shape.n_experts:
        raise UserError(f"{shape.n_active_experts} of {shape.n_experts} experts cannot be active", "give 1 to all")
    if shape.n_parameters > MAX_PARAMETERS:
        raise UserError(
            f"{shape.n_layers} layers of width {shape.width} and a vocabulary of {shape.vocabulary} have "
            f"{in_words(shape.n_parameters)} parameters",
            f"give a model of {MAX_PARAMETERS:g} at most",
        )
    if shape.block_parameters <= 0:
        raise UserError(
            f"a vocabulary of {shape.vocabulary} is larger than all {in_words(shape.n_parameters)} parameters",
            "give a smaller one",
        )
    return shape


def in_words(n_parameters: float) -> str:
    """A number in words, such as "7.5 billion"."""
    rounded = float(f"{n_parameters:.3g}")
    factor, word = next((one for one in _WORDS if rounded >= one[0]), (1.0, ""))
    return f"{rounded / factor:,g} {word}".rstrip()


def from_dimensions(
    n_layers: int,
    width: int,
    n_heads: int | None = None,
    n_context: int | None = None,
    vocabulary: int | None = None,
    n_parameters: float | None = None,
    **more: Any,
) -> ModelShape:
    """A GPT's shape from a user's numbers; the feed-forward is four times as wide, unless `more` has its width.

    Heads have 128 dimensions each, sequences 2048 tokens, and the vocabulary is GPT-2's, unless they are given.
    `n_parameters` is only for comparison. Raises as `checked`.
    """
    assumed = [
        name
        for name, value in (("n_heads", n_heads), ("n_context", n_context), ("vocabulary", vocabulary))
        if value is None
    ]
    if width < 1:
        raise UserError(f"the model's width is {width}", "give 1 or more")
    heads = n_heads if n_heads is not None else max(1, width // HEAD_WIDTH)
    if heads < 1 or width % heads:
        raise UserError(f"a width of {width} cannot be divided among {heads} heads", "give a divisor of the width")
    fields: dict[str, Any] = {"n_kv_heads": heads, "head_width": width // heads, "ffn_width": 4 * width, **more}
    shape = checked(
        ModelShape(
            n_layers=n_layers,
            width=width,
            n_heads=heads,
            n_context=n_context if n_context is not None else CONTEXT,
            vocabulary=vocabulary if vocabulary is not None else VOCABULARY,
            assumed=tuple(assumed),
            **fields,
        )
    )
    if n_parameters is not None and abs(shape.n_parameters / n_parameters - 1) > _TOLERANCE:
        raise UserError(
            f"{n_layers} layers of width {width} have {in_words(shape.n_parameters)} parameters, "
            f"not {in_words(n_parameters)}",
            "give the layers and the width, or the number of parameters",
        )
    return shape


def from_parameters(n_parameters: float, n_context: int | None = None, vocabulary: int | None = None) -> ModelShape:
    """A GPT with this number of parameters and the usual proportions, which are assumed.

    Raises UserError if the number is smaller than one block of the least width.
    """
    words = vocabulary if vocabulary is not None else VOCABULARY
    # 12 l w^2 + v w = n with l = w / ASPECT
    width = HEAD_WIDTH
    while 12 * width**3 / ASPECT + words * width < n_parameters:
        width += _WIDTH_STEP if width >= _WIDTH_STEP else HEAD_WIDTH
    n_layers = round((n_parameters - words * width) / (12 * width**2))
    while n_layers < 1 and width > HEAD_WIDTH:
        width -= HEAD_WIDTH
        n_layers = round((n_parameters - words * width) / (12 * width**2))
    if n_layers < 1:
        raise UserError(
            f"{n_parameters:,.12g} parameters are fewer than a vocabulary of {words} needs",
            "give more, or the model's layers and width",
        )
    shape = from_dimensions(n_layers, width, None, n_context, vocabulary)
    return msgspec.structs.replace(
        shape, stated_parameters=float(n_parameters), assumed=("n_layers", "width", *shape.assumed)
    )


def divisors(number: int, most: int) -> list[int]:
    """Powers of two that divide `number`, up to `most`."""
    return [1 << place for place in range(int(math.log2(most)) + 1) if number % (1 << place) == 0]
