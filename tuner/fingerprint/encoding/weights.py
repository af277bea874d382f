"""Which weights are in use: those in the store, else those shipped, else none (rules)."""

from __future__ import annotations

import hashlib
import logging
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zerotune.store.records import ModelRecord
from zerotune.tuner.fingerprint.encoding.encoders import Encoder, encoder_from_bytes
from zerotune.tuner.fingerprint.encoding.features import FEATURES_VERSION

if TYPE_CHECKING:
    from zerotune.store.sqlite.database import Store

_log = logging.getLogger("zerotune.stage")

SHIPPED: Final = Path(__file__).parent / "weights"
KINDS: Final = ("lstm", "ngram")
"""Best first, by accuracy on frameworks left out of training (docs/design/stage-fingerprint.md)."""
FABRIC: Final = ""
"""Stage models belong to no fabric."""
DAMAGED: Final = ".damaged"
_COPIED: Final = {"origin": "shipped"}
"""Marks a copy of shipped weights in the store: other shipped weights replace it."""


def model_name(kind: str) -> str:
    """The name under which the store keeps an encoder's weights."""
    return f"stage-{kind}"


def shipped_blob(kind: str) -> bytes:
    """The committed weights, made by `zerotune stage train`."""
    return (SHIPPED / f"{kind}.weights").read_bytes()


@lru_cache(maxsize=1)
def default_encoder() -> Encoder | None:
    """The shipped encoder, the next best if it cannot be read, None if none can."""
    for kind in KINDS:
        try:
            return encoder_from_bytes(shipped_blob(kind))
        except (OSError, ValueError) as error:
            _log.warning("the shipped %s weights cannot be used: %s", kind, error)
    return None


def record(kind: str, blob: bytes, *, is_copy: bool = False) -> ModelRecord:
    """One encoder's weights as the store keeps them.

    Args:
        kind: one of KINDS.
        blob: the weights, from `Encoder.to_bytes`.
        is_copy: the weights were shipped, not trained here.

    Returns:
        The row for the store's table of models.
    """
    versions = {"features": str(FEATURES_VERSION), "model": kind, **(_COPIED if is_copy else {})}
    return ModelRecord(model_name(kind), FABRIC, blob, versions, hashlib.sha256(blob).hexdigest(), None, time.time())


def is_copy(model: ModelRecord) -> bool:
    """Whether the store's weights are a copy of shipped ones, of some version."""
    return model.versions.items() >= _COPIED.items()


def load_encoder(store: Store) -> Encoder | None:
    """The best encoder that can be read from the store; the shipped ones are put there at first use.

    A blob that is damaged or foreign is set aside under another name, and the shipped weights take its place. What was
    trained into the store is kept; what was only copied there gives way to other shipped weights.
    """
    for kind in KINDS:
        saved = store.load_model(model_name(kind), FABRIC)
        if saved is not None and not is_copy(saved):
            try:
                return encoder_from_bytes(saved.blob)
            except ValueError as error:
                _log.warning("the stored %s weights cannot be used (%s); set aside", kind, error)
                store.rename_model(saved.name, FABRIC, saved.name + DAMAGED)
        try:
            blob = shipped_blob(kind)
            encoder = encoder_from_bytes(blob)
        except (OSError, ValueError) as error:
            _log.warning("the shipped %s weights cannot be used: %s", kind, error)
            continue
        if saved is None or saved.blob != blob:
            store.save_model(record(kind, blob, is_copy=True))
        return encoder
    return None
