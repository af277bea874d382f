"""Stored weights: named plain arrays in MessagePack, checked when read; nothing is ever unpickled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

MAX_BLOB_BYTES: Final = 200_000
FORMAT: Final = "zerotune-stage-weights"
FORMAT_VERSION: Final = 1

Arrays = dict[str, npt.NDArray[np.float64]]


class _Array(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    values: bytes
    """Little-endian 32-bit floats."""


class _Document(msgspec.Struct, frozen=True):
    format: str
    version: int
    kind: str
    features: int
    arrays: dict[str, _Array]


_decoder: Final = msgspec.msgpack.Decoder(_Document)


def to_bytes(kind: str, features_version: int, arrays: Mapping[str, npt.NDArray[np.float64]]) -> bytes:
    """Pack the `arrays` of an encoder of that `kind`, as 32-bit floats; `from_bytes` reads them."""
    packed = {
        name: _Array(tuple(int(extent) for extent in array.shape), array.astype("<f4").tobytes())
        for name, array in sorted(arrays.items())
    }
    return msgspec.msgpack.encode(_Document(FORMAT, FORMAT_VERSION, kind, features_version, packed))


def from_bytes(blob: bytes, features_version: int) -> tuple[str, Arrays]:
    """(kind, arrays) as `to_bytes` packed them; ValueError if the bytes are damaged, foreign or of another version.

    Values that are not finite also raise ValueError.
    """
    if len(blob) > MAX_BLOB_BYTES:
        raise ValueError(f"{len(blob)} bytes are over the limit of {MAX_BLOB_BYTES}")
    try:
        document = _decoder.decode(blob)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"no weights: {error}") from error
    if (document.format, document.version) != (FORMAT, FORMAT_VERSION):
        raise ValueError(f"{document.format} version {document.version} is not {FORMAT} version {FORMAT_VERSION}")
    if document.features != features_version:
        raise ValueError(f"weights read features of version {document.features}, these are {features_version}")
    arrays: Arrays = {}
    for name, array in document.arrays.items():
        if any(extent < 0 for extent in array.shape) or 4 * math.prod(array.shape) != len(array.values):
            raise ValueError(f"array {name} of shape {array.shape} has {len(array.values)} bytes")
        values = np.frombuffer(array.values, "<f4")
        if not np.isfinite(values).all():
            raise ValueError(f"array {name} holds values that are not finite")
        arrays[name] = values.astype(np.float64).reshape(array.shape)
    return document.kind, arrays
