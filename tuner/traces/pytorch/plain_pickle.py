"""Reads pickles that have only plain data, without unpickling.

The pickle module executes instructions that can import and call anything; it is not used here.
`load_plain` reads the instructions (`pickletools.genops` only lists them) and executes those that build None, booleans,
numbers, text, bytes, lists, tuples and dicts. Every other instruction is a TraceError: above all those that name a
global, call, build an object or refer to an extension. So even a hostile file can only make plain containers, and
memory stays proportional to the file, as no instruction creates more than its own argument.
"""

from __future__ import annotations

import io
import pickletools
from typing import Any, Final

from ....store.errors import TraceError

MAX_PICKLE_BYTES: Final = 1 << 28
MAX_INSTRUCTIONS: Final = 1 << 24
"""Each instruction builds one value at most; a dump of 20,000 entries with stacks has about eight million."""

_IGNORED: Final = frozenset({"PROTO", "FRAME"})
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_SCALARS: Final = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE",
        "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "STRING",
        "BINSTRING", "SHORT_BINSTRING",
    }
)  # fmt: skip
_EMPTY: Final = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK: Final = object()


def load_plain(data: bytes) -> Any:
    """The plain value that `data` describes; TraceError for anything else, and for a damaged pickle."""
    try:
        return _Machine().run(data)
    except TraceError:
        raise
    except Exception as error:  # damaged input raises many kinds of errors
        raise _refusal(f"is damaged ({type(error).__name__}: {error})") from None


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for index, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
            if index >= MAX_INSTRUCTIONS:
                raise _refusal("holds more values than a dump can")
            name = opcode.name
            if name == "STOP":
                if len(self._stack) != 1:
                    raise _refusal("is damaged (values are left over)")
                return self._stack[0]
            self._step(name, argument)
        raise _refusal("ends early")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _SCALARS:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(argument)])
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[int(argument)] = stack[-1]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "APPEND":
            value = stack.pop()
            _plain(stack[-1], list).append(value)
        elif name == "APPENDS":
            values = self._to_mark()
            _plain(stack[-1], list).extend(values)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _plain(stack[-1], dict)[_key(key)] = value
        elif name == "SETITEMS":
            values = self._to_mark()
            _plain(stack[-1], dict).update(_pairs(values))
        elif name in _TUPLES:
            n_values = _TUPLES[name]
            values = [stack.pop() for _ in range(n_values)]
            stack.append(tuple(reversed(values)))
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name == "LIST":
            stack.append(self._to_mark())
        elif name == "DICT":
            stack.append(_pairs(self._to_mark()))
        elif name not in _IGNORED:
            raise _refusal(f"contains {name}, which plain data never needs")

    def _to_mark(self) -> list[Any]:
        values: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return {_key(key): value for key, value in zip(values[::2], values[1::2], strict=True)}


def _key(key: Any) -> Any:
    """A key of a dict; only scalars, as hashing tuples with shared parts can take exponential time."""
    if isinstance(key, tuple):
        raise _refusal("has a tuple for a key, which no trace needs")
    return key


def _plain(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _refusal("is damaged (a container is not what it should be)")
    return value


def _refusal(what: str) -> TraceError:
    return TraceError(f"the pickle {what}", "only dumps of plain data are read; convert it to JSON where it was made")
