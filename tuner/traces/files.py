"""Reads untrusted files that may be larger than memory, compressed or not."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar

import msgspec

from ...store.errors import TraceAccessError, TraceError
from .records import Summary

CHUNK_BYTES: Final = 1 << 19
MAX_LINE_BYTES: Final = 16 << 20
BATCH_CHARS: Final = 1 << 17
MAX_ELEMENT_CHARS: Final = 32 << 20
"""Longest element of a JSON array."""
_HEAD_BYTES: Final = 1 << 16
_GZIP_WINDOW_BITS: Final = 31
_GZIP_MAGIC: Final = b"\x1f\x8b"
_PACKED_CHUNK_BYTES: Final = 1 << 14
"""Bytes read at once, and unpacked completely. Small, since the rest behind a gzip member is copied."""
FREE_BYTES: Final = 4 << 20
"""Unpacked bytes without a check of the ratio, as a short file of equal rows packs as well as a bomb."""
MAX_RATIO: Final = 250
"""Unpacked bytes for each packed one; gzip's own limit is 1,032. Real traces and logs have 5 to 40."""
MAX_UNPACKED_BYTES: Final = 16 << 30


class TraceFile:
    """An open file, plain or gzip. After the last byte, `is_cut` is True if compressed data ended early."""

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        self.is_cut = False
        self.member_begin = 0
        """Byte of the packed file at which the current gzip member of `pieces` begins."""
        self._raw, self._path = raw, path
        self._is_packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        self._unread = self.pieces()
        self._ready = bytearray()

    def read(self, n_bytes: int) -> bytes:
        """The next unpacked bytes; empty at the end."""
        if not self._is_packed:
            return self._raw.read(n_bytes)
        while len(self._ready) < n_bytes and (piece := next(self._unread, None)):
            self._ready += piece[0]
        taken = bytes(self._ready[:n_bytes])
        del self._ready[:n_bytes]
        return taken

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """Pieces of unpacked bytes, each with whether a gzip member ends there.

        Raises zlib.error if the file is no gzip, or damaged. Raises TraceError if it unpacks to more than
        MAX_UNPACKED_BYTES, or beyond FREE_BYTES to more than MAX_RATIO times its size.
        """
        n_packed = n_unpacked = 0
        packed = self._raw.read(_PACKED_CHUNK_BYTES)
        while packed:
            rest = packed.lstrip(b"\0")  # padding between members
            n_packed += len(packed) - len(rest)
            packed = rest or self._raw.read(_PACKED_CHUNK_BYTES)
            if not rest:
                continue
            self.member_begin = n_packed
            unpacker = zlib.decompressobj(_GZIP_WINDOW_BITS)
            while not unpacker.eof:
                packed = packed or self._raw.read(_PACKED_CHUNK_BYTES)
                part = unpacker.decompress(packed, FREE_BYTES + 1)
                if not part and not packed:
                    self.is_cut = True
                    return
                rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
                n_packed, n_unpacked = n_packed + len(packed) - len(rest), n_unpacked + len(part)
                self._check_ratio(n_packed, n_unpacked)
                packed = rest
                yield part, unpacker.eof
            packed = packed or self._raw.read(_PACKED_CHUNK_BYTES)

    def _check_ratio(self, n_packed: int, n_unpacked: int) -> None:
        if n_unpacked > MAX_UNPACKED_BYTES:
            most = f"{MAX_UNPACKED_BYTES >> 30} GiB"
            raise TraceError(f"{self._path} unpacks to more than {most}", "unpack it, and split it")
        if n_unpacked > max(FREE_BYTES, MAX_RATIO * n_packed):
            raise TraceError(
                f"{self._path} unpacks to more than {MAX_RATIO} times its size, as no trace does",
                "if you know who made it, unpack it and name the unpacked file",
            )


@contextmanager
def opened(path: Path) -> Iterator[TraceFile]:
    """The open file; errors of reading it become TraceError."""
    try:
        with path.open("rb") as raw:
            yield TraceFile(raw, path)
    except OSError as error:
        raise TraceAccessError(f"{path} cannot be read: {error.strerror}", "check the file's permissions") from None
    except zlib.error as error:
        raise TraceError(f"{path} is damaged: {error}", "copy it again") from None


def head(path: Path) -> bytes:
    """The first 64 KiB of a file after decompression."""
    with opened(path) as file:
        return file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)


def line_chunks(path: Path, summary: Summary | None = None) -> Iterator[bytes]:
    """The file in pieces of about half a megabyte that end where a line ends (the last may not).

    `summary` gets a note if the file seems to be truncated. A line longer than MAX_LINE_BYTES raises TraceError.
    """
    with opened(path) as file:
        rest, is_first = b"", True
        while piece := file.read(CHUNK_BYTES):
            if is_first:
                piece, is_first = piece.removeprefix(codecs.BOM_UTF8), False
            end = piece.rfind(b"\n") + 1
            if end:
                yield rest + memoryview(piece)[:end]
                rest = piece[end:]
            else:
                rest += piece
                if len(rest) > MAX_LINE_BYTES:
                    raise TraceError(f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB", "it is no text log")
        if summary is not None and (file.is_cut or rest):
            how = "its compressed data end early" if file.is_cut else "its last line has no end"
            summary.fault(f"{path.name} is cut ({how}): it was read up to there")
        if rest:
            yield rest


_Value = TypeVar("_Value")


class Batches(NamedTuple):
    """How to decode many elements of an array at once, which is many times faster with msgspec."""

    first_key: str
    """The quoted key at which each element usually begins; it may be another one."""
    decoder: msgspec.json.Decoder[Any]


class JsonStream:
    """Reads a JSON document piece by piece: members of the top-level object, elements of its arrays.

    This is not ijson, whose memory grows with the square of the nesting depth, which a hostile file chooses. ijson also
    refuses NaN and text that is not UTF-8, which traces have.

    `members()` yields (key, value); for the keys in `streamed`, the value is an iterator over the array's
    elements that must be used up before going on. Afterwards, `truncated` is True if the document ended
    early; everything before its end was yielded. `batches` reads many elements at once if possible.
    """

    def __init__(self, path: Path, streamed: tuple[str, ...] = (), batches: Batches | None = None) -> None:
        self._path = path
        self._streamed = streamed
        self._batches = batches
        self._n_pieces = 0
        self._unbatched_piece = -1
        self._decoder = json.JSONDecoder()
        self._buffer = ""
        self._at = 0
        self._ended = False
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self.truncated = False

    def members(self) -> Iterator[tuple[str, Any]]:
        """Members of a top-level object, or ("", elements) of a top-level array."""
        with opened(self._path) as file:
            self._file = file
            yield from self._until_cut(self._document())
            if not self.truncated and self._goes_on():
                raise TraceError(
                    f"{self._path} goes on after its JSON document", "give each document a file of its own"
                )

    def _goes_on(self) -> bool:
        try:
            return bool(self._peek())
        except _EndedEarly:
            return False

    def _until_cut(self, values: Iterator[_Value]) -> Iterator[_Value]:
        try:
            yield from values
        except _EndedEarly:
            self.truncated = True
        except RecursionError:
            raise self._damaged("is nested too deeply") from None

    def _document(self) -> Iterator[tuple[str, Any]]:
        first = self._peek()
        if first == "[":
            yield "", self._until_cut(self._elements())
            return
        if first != "{":
            raise self._damaged("is not JSON")
        self._at += 1
        if self._peek() == "}":
            return
        while True:
            if self._peek() != '"':
                raise self._damaged("has a member without a name")
            key = self._value()
            if self._peek() != ":":
                raise self._damaged("has a member without a value")
            self._at += 1
            if key in self._streamed and self._peek() == "[":
                yield key, self._until_cut(self._elements())
                if self.truncated:
                    return
            else:
                yield key, self._value()
            following = self._peek()
            self._at += 1
            if following == "}":
                return
            if following != ",":
                raise self._damaged(f"has {following!r} where a comma belongs")

    def _elements(self) -> Iterator[Any]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return
        while True:
            if self._batches is not None:
                yield from self._batched(self._batches)
            yield self._value()
            following = self._peek()
            self._at += 1
            if following == "]":
                return
            if following != ",":
                raise self._damaged(f"has {following!r} where a comma belongs")

    def _batched(self, batches: Batches) -> Iterator[Any]:
        """Elements up to the last one that begins in the buffer, if they can be read together."""
        while self._peek() == "{" and self._n_pieces != self._unbatched_piece:
            if len(self._buffer) - self._at < BATCH_CHARS and not self._ended:
                self._more()
            # The begin of the last element in the next BATCH_CHARS: the comma before its brace before its first key.
            mark = self._buffer.rfind(batches.first_key, self._at, self._at + BATCH_CHARS)
            brace = self._buffer.rfind("{", self._at, max(mark, 0))
            end = self._buffer.rfind(",", self._at, max(brace, 0))
            elements = None
            if end > self._at:
                # Elements that cannot be read together are read one by one to find the error.
                with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    elements = batches.decoder.decode(f"[{self._buffer[self._at : end]}]")
            if elements is None:
                self._unbatched_piece = self._n_pieces
                return
            self._at = end + 1
            yield from elements

    def _peek(self) -> str:
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                raise _EndedEarly

    def _value(self) -> Any:
        self._peek()
        wanted = 0
        while True:
            if wanted <= len(self._buffer) - self._at or self._ended:
                try:
                    value, end = self._decoder.raw_decode(self._buffer, self._at)
                except json.JSONDecodeError as error:
                    # Only an error at the very end, or a string without one, can be mended by reading on.
                    cut = error.pos >= len(self._buffer) - _TAIL_CHARS or error.msg.startswith("Unterminated")
                    if not cut:
                        raise self._damaged(f"is not JSON ({error.msg})") from None
                    if self._ended:
                        raise _EndedEarly from None
                    wanted = 2 * (len(self._buffer) - self._at)
                except ValueError as error:
                    raise self._damaged(f"has an impossible number ({error})") from None
                else:
                    if end < len(self._buffer) or self._ended:
                        self._at = end
                        return value
                    wanted = len(self._buffer) - self._at + 1
            if len(self._buffer) - self._at > MAX_ELEMENT_CHARS:
                raise self._damaged(f"has one value of more than {MAX_ELEMENT_CHARS >> 20} MiB")
            self._more()

    def _more(self) -> bool:
        piece = self._file.read(CHUNK_BYTES)
        if not piece:
            self._ended = True
            return False
        # Bytes that are not UTF-8 can only be within strings, where they do not matter to us.
        self._buffer = self._buffer[self._at :] + self._utf8.decode(piece)
        self._at = 0
        self._n_pieces += 1
        return True

    def _damaged(self, what: str) -> TraceError:
        return TraceError(f"{self._path} {what}", "it is not a whole JSON trace; copy it again from its source")


_SPACE: Final = re.compile(r"[ \t\r\n]*")
_TAIL_CHARS: Final = 16
"""A syntax error within this distance of the end means that the file is truncated."""


class _EndedEarly(Exception):
    """The document ended early."""
