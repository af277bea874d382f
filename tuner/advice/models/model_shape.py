"""What a decoder's memory and time depend on."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from ....store.errors import UserError

ASPECT: Final = 100
"""Width over layers of a model of which only the size is known; Kaplan et al. 2020, arXiv:2001.08361, section 3.1:
the loss hardly depends on it between 30 and 300."""
HEAD_WIDTH: Final = 128
_WIDTH_STEP: Final = 1024
"""Large models: so that eight ranks can share the heads."""
VOCABULARY: Final = 50257
"""GPT-2's."""
CONTEXT: Final = 2048
MAX_PARAMETERS: Final = 1e18
_WORDS: Final = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
_TOLERANCE: Final = 0.1
"""Up to which share the stated number of parameters may differ from the one that the shape has."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer of equal blocks.

    `ffn_width` is one expert's; `gated`: its feed-forward has three matrices instead of two. `n_layers` counts
    encoder blocks too, where there is an encoder.
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
    """Of a feed-forward that every token meets beside its experts."""
    n_attentions: float = 1.0
    """Of a block, in the mean: decoder blocks beside an encoder have two."""
    vocabulary: int = VOCABULARY
    embedding_width: int = 0
    """Of embedding and head, where they are narrower than blocks; 0: as wide."""
    n_context: int = CONTEXT
    tied: bool = True
    """The embedding is the head, too."""
    learned_positions: bool = False
    causal: bool = True
    mixer_parameters: float | None = None
    """Of a block's attention in the mean, if its matrices are others than the widths give; None: they are not."""
    stated_parameters: float | None = None
    """Counted from the real model, where somebody did."""
    assumed: tuple[str, ...] = ()
    """Names of what nobody stated."""

    @property
    def query_width(self) -> int:
        """All heads together."""
        return self.n_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Keys of all key-value heads; values are as many."""
        return self.n_kv_heads * self.head_width

    @property
    def attention_parameters(self) -> float:
        """Of the projections of one block."""
        usual = self.n_attentions * self.width * (2 * self.query_width + 2 * self.kv_width)
        return usual if self.mixer_parameters is None else self.mixer_parameters

    @property
    def active_ffn_width(self) -> int:
        """Of all feed-forwards of one block that one token meets."""
        return self.n_active_experts * self.ffn_width + self.shared_ffn_width

    @property
    def words_width(self) -> int:
        """Of embedding and head."""
        return self.embedding_width or self.width

    def _ffn_parameters(self, ffn_width: int) -> int:
        return (3 if self.gated else 2) * self.width * ffn_width

    @property
    def block_parameters(self) -> float:
        """Of one block, norms and biases left out."""
        if self.stated_parameters is not None:
            return (self.stated_parameters - self.outer_parameters) / self.n_layers
        return self.attention_parameters + self._ffn_parameters(self.n_experts * self.ffn_width + self.shared_ffn_width)

    @property
    def active_block_parameters(self) -> float:
        """That one token meets in one block."""
        return self.attention_parameters + self._ffn_parameters(self.active_ffn_width)

    @property
    def outer_parameters(self) -> int:
        """Of embeddings and head."""
        positions = self.n_context if self.learned_positions else 0
        projections = 2 * self.embedding_width * self.width  # of narrow embeddings to blocks, and back
        return self.vocabulary * (1 if self.tied else 2) * self.words_width + positions * self.width + projections

    @property
    def n_parameters(self) -> float:
        """Of the whole model."""
        return self.n_layers * self.block_parameters + self.outer_parameters

    def model_flops_per_token(self) -> float:
        """Forward and backward without recomputation: 6 per parameter that multiplies, 12 per layer, width and context.

        Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B: attention counts whole, also where it is causal.
        """
        multiplied = self.n_layers * self.active_block_parameters + self.vocabulary * self.words_width
        return 6.0 * multiplied + 3.0 * self.n_layers * self.attention_flops_per_token

    @property
    def attention_flops_per_token(self) -> float:
        """Forward in one block, beside the projections."""
        return 4.0 * self.n_attentions * self.query_width * self.n_context


def checked(shape: ModelShape) -> ModelShape:
    """The shape itself, if it can be one.

    Raises:
        UserError: a number is below one, or two of them contradict each other.
    """
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
    """As people say it: 7.5 billion."""
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
    """A GPT's shape from what a user states; feed-forward four times as wide, where `more` does not say otherwise.

    Args:
        n_layers: blocks.
        width: hidden size.
        n_heads: None: of 128 each.
        n_context: tokens of a sequence; None: 2048.
        vocabulary: None: GPT-2's.
        n_parameters: if stated as well, for comparison.
        more: other fields of `ModelShape`.

    Returns:
        The shape.

    Raises:
        UserError: a number is below one, or two of them contradict each other.
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
    """A GPT of so many parameters, of the usual proportions; only the number is taken to be known.

    Raises:
        UserError: it is smaller than one block of the least width.
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
