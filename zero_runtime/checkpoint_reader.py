"""Reads a checkpoint's index without running what a file names."""

from __future__ import annotations

import pickle
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .errors import CheckpointError

_TRUSTED_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}


def _enum_member(kind: type, name: str) -> Enum:
    """Replaces getattr, by which Python 3.11.0 to 3.11.3 pickle an enum's member."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise CheckpointError(f"the checkpoint's index asks {kind} for {name!r}; only read checkpoints that you trust")


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles only the types of DCP's index: plain records, enums, dtypes, paths."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _TRUSTED_NAMES:
            return super().find_class(module, name)
        # A dotted name could reach anything that a module imports.
        is_known = module.startswith("torch.distributed.checkpoint.") or module.split(".")[0] == "pathlib"
        if is_known and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, (Enum, PurePath))):
                return found
        raise CheckpointError(f"the checkpoint's index names {module}.{name}; only read checkpoints that you trust")


class SafeReader(dcp.FileSystemReader):
    """Reads a DCP folder without executing code from its index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; raises `CheckpointError` if it is missing, broken, or names anything but known classes."""
        try:
            if strange := next((one for one in Path(self.path).iterdir() if not (one.is_file() or one.is_dir())), None):
                raise CheckpointError(f"{strange} is no regular file; choose a complete checkpoint")
            with open(Path(self.path) / ".metadata", "rb") as file:
                metadata: Metadata = _IndexUnpickler(file).load()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle may raise any exception
            raise CheckpointError(
                f"{self.path} has no readable index ({error}); choose a complete checkpoint"
            ) from None
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
