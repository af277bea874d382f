"""Which weights are in use: those in the store, else those shipped, else none: then no stage is recognised."""

from __future__ import annotations

import hashlib
import logging
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zerotune.store.records import ModelRecord
from zerotune.tuner.fingerprint.encoding.encoders import LstmEncoder
from zerotune.tuner.fingerprint.encoding.features import FEATURES_VERSION

if TYPE_CHECKING:
    from zerotune.store.sqlite.database import Store

_log = logging.getLogger("zerotune.stage")

SHIPPED: Final = Path(__file__).parent / "weights" / "lstm.weights"
MODEL_NAME: Final = "stage-lstm"
"""The name under which the store keeps the weights."""
FABRIC: Final = ""
"""Stage models belong to no fabric."""
DAMAGED: Final = ".damaged"
_COPIED: Final = {"origin": "shipped"}
"""Marks a copy of shipped weights in the store: other shipped weights replace it."""


@lru_cache(maxsize=1)
def default_encoder() -> LstmEncoder | None:
    """The shipped encoder, None if it cannot be read."""
    try:
        return LstmEncoder.from_bytes(SHIPPED.read_bytes())
    except (OSError, ValueError) as error:
        _log.warning("the shipped weights cannot be used: %s", error)
        return None


def record(blob: bytes, *, is_copy: bool = False) -> ModelRecord:
    """The weights as a row of the store's table of models.

    Args:
        blob: the weights, from `LstmEncoder.to_bytes`.
        is_copy: the weights were shipped, not trained here.
    """
    versions = {"features": str(FEATURES_VERSION), "model": "lstm", **(_COPIED if is_copy else {})}
    return ModelRecord(MODEL_NAME, FABRIC, blob, versions, hashlib.sha256(blob).hexdigest(), None, time.time())


def is_copy(model: ModelRecord) -> bool:
    """Whether the store's weights are a copy of shipped ones, of some version."""
    return model.versions.items() >= _COPIED.items()


def load_encoder(store: Store) -> LstmEncoder | None:
    """The encoder that can be read from the store; the shipped weights are put there at first use.

    A blob that is damaged or foreign is set aside under another name, and the shipped weights take its place. Weights
    that were trained into the store are kept; a copy gives way to other shipped weights.
    """
    saved = store.load_model(MODEL_NAME, FABRIC)
    if saved is not None and not is_copy(saved):
        try:
            return LstmEncoder.from_bytes(saved.blob)
        except ValueError as error:
            _log.warning("the stored weights cannot be used (%s); set aside", error)
            store.rename_model(MODEL_NAME, FABRIC, MODEL_NAME + DAMAGED)
    encoder = default_encoder()
    if encoder is not None:
        blob = encoder.to_bytes()
        if saved is None or saved.blob != blob:
            store.save_model(record(blob, is_copy=True))
    return encoder
