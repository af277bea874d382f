"""Functions and variables of a shared library by its ELF symbol tables.

cudart is linked into libnccl statically, so its functions are in `.symtab` only; exported functions are in `.dynsym`.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....store.errors import UserError, reason

_SYMTAB: Final = 2
_DYNSYM: Final = 11
_VARIABLE: Final = 1
_FUNCTION: Final = 2
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"), ("bytes", "<u8"),
     ("link", "<u4"), ("info", "<u4"), ("alignment", "<u8"), ("entry_bytes", "<u8")]
)  # fmt: skip
_SYMBOL: Final = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("bytes", "<u8")]
)


class Symbol(NamedTuple):
    """A function or a variable."""

    name: str
    address: int
    """Relative to the address of the loaded library."""
    n_bytes: int


def functions(path: Path) -> list[Symbol]:
    """Every function of the library's symbol table.

    Raises:
        UserError: the file cannot be read, is not a 64-bit ELF library, or is stripped.
    """
    return _symbols(path, _FUNCTION, _SYMTAB)


def exported_functions(path: Path) -> list[Symbol]:
    """Every function that the library exports; raises as `functions`."""
    return _symbols(path, _FUNCTION, _DYNSYM)


def variables(path: Path) -> list[Symbol]:
    """Every variable of the library's symbol table; raises as `functions`."""
    return _symbols(path, _VARIABLE, _SYMTAB)


def _symbols(path: Path, kind: int, table: int) -> list[Symbol]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(path, content, kind, table)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}", "name a libnccl.so.2") from error


def _read(path: Path, content: mmap.mmap, kind: int, table_type: int) -> list[Symbol]:
    if len(content) < _HEADER.size or content[:6] != b"\x7fELF\x02\x01":
        raise UserError(f"{path} is no 64-bit shared library", "name a libnccl.so.2")
    header = _HEADER.unpack_from(content)
    sections = _array(path, content, header[6], header[12], _SECTION)
    tables = sections[sections["type"] == table_type]
    if len(tables) == 0:
        raise UserError(f"{path} is stripped: it has no symbol table", "take the library of NVIDIA's wheel")
    table = tables[0]
    if not table["link"] < len(sections):
        raise UserError(f"{path} is damaged: its symbols have no names", "take the library of NVIDIA's wheel")
    symbols = _array(path, content, int(table["offset"]), int(table["bytes"]) // _SYMBOL.itemsize, _SYMBOL)
    names = sections[table["link"]]
    first, end = int(names["offset"]), int(names["offset"]) + int(names["bytes"])
    found = symbols[(symbols["info"] & 15 == kind) & (symbols["value"] != 0)]
    return [
        Symbol(_name(content, first + int(symbol["name"]), end), int(symbol["value"]), int(symbol["bytes"]))
        for symbol in found
    ]


def _name(content: mmap.mmap, begin: int, end: int) -> str:
    stop = content.find(b"\0", begin, end)
    return content[begin : stop if stop >= 0 else begin].decode("ascii", "replace")


def _array(path: Path, content: mmap.mmap, offset: int, n: int, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    if offset + n * dtype.itemsize > len(content):
        raise UserError(f"{path} is cut off: its tables lie beyond its end", "fetch it again")
    return np.frombuffer(content[offset : offset + n * dtype.itemsize], dtype)
