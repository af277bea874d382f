"""Files below a URL: a directory, or a protocol of fsspec (s3://, gs://, memory://; https:// only to read).

Reads and writes raise any exception of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import fsspec
import fsspec.utils

from ...store.atomic_file import sync_folder
from ...store.errors import UserError, reason
from ...store.foreign.regular_file import begin_of

READ_ONLY: Final = ("http", "https")
WEB_S: Final = 60.0
"""Longest wait for one answer of a web server."""
DEEPEST: Final = 4
"""Depth of our folders: version, fabric, day."""


class IrregularError(Exception):
    """The path is no regular file."""


class Storage:
    """One folder of objects. The first read or write opens it, and may be slow or fail.

    Raises UserError if no such protocol is installed, or it is read-only although `writes`.
    """

    def __init__(self, url: str, *, writes: bool = False) -> None:
        protocol = fsspec.utils.get_protocol(url)
        try:
            fsspec.get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            raise UserError(f"{shown(url)}: {error}", "name a directory, or a URL that fsspec knows") from error
        if writes and protocol in READ_ONLY:
            raise UserError(f"{shown(url)} can only be read", "name a directory, or s3://BUCKET/PREFIX ...")
        self.url = url
        self._is_local = protocol in ("file", "local")
        self._is_web = protocol in READ_ONLY
        self._found: tuple[Any, str] | None = None

    def put(self, path: str, data: bytes) -> None:
        """Write a file that is never overwritten; does nothing if it exists."""
        files, root = self._open()
        whole = posixpath.join(root, path)
        if self._is_local:
            _put_local(Path(whole), data)
            return
        with contextlib.suppress(FileExistsError):
            if (
                not files.async_impl
            ):  # object stores have no folders, and a typing error must not make a bucket
                files.makedirs(posixpath.dirname(whole), exist_ok=True)
            if not files.exists(whole):
                files.pipe_file(whole, data)  # complete or not at all; any other writer writes the same bytes

    def read(self, path: str, max_bytes: int) -> bytes:
        """A file's bytes; if it is larger, its first `max_bytes` + 1 bytes.

        Raises:
            IrregularError: it is a pipe, a device or a folder, which may be endless.
        """
        files, root = self._open()
        if self._is_local:
            try:
                return begin_of(Path(posixpath.join(root, path) if path else root), max_bytes + 1)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EISDIR, errno.ENXIO):
                    raise IrregularError(reason(error)) from error
                raise
        with files.open(self._below(root, path) if path else root, "rb") as file:
            found: bytes = file.read(max_bytes + 1)
        return found

    def file(self, path: str) -> Any:
        """A file to read parts of; use it in a `with` statement."""
        files, root = self._open()
        return files.open(self._below(root, path), "rb")

    def walk(self, below: str) -> Iterator[str]:
        """Paths of all files below a folder, sorted, without hidden ones; none if there is no such folder."""
        files, root = self._open()
        if self._is_local:
            yield from sorted(_files_below(Path(root), below))
            return
        with contextlib.suppress(FileNotFoundError):
            files.invalidate_cache()
            # A web server's folders are listed one by one; object stores list all at once.
            for path in sorted(files.find(self._below(root, below), maxdepth=DEEPEST if self._is_web else None)):
                if not posixpath.basename(path).startswith("."):
                    found = posixpath.relpath(path, root)
                    yield urllib.parse.unquote(found) if self._is_web else found

    def _below(self, root: str, path: str) -> str:
        """Our names have signs that are escaped in web addresses, also in a server's lists."""
        return posixpath.join(root, urllib.parse.quote(path) if self._is_web else path)

    def _open(self) -> tuple[Any, str]:
        if self._found is None:
            files, root = fsspec.url_to_fs(self.url, **_options(self._is_web))
            self._found = files, str(root)
        return self._found


def _options(is_web: bool) -> dict[str, Any]:
    if not is_web:
        return {}
    import aiohttp

    return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=WEB_S)}}


def shown(url: str) -> str:
    """A URL without parts that may be secret."""
    return re.sub(r"(?<=://)[^/@]*@", "...@", url).partition("?")[0]


def _files_below(root: Path, below: str) -> Iterator[str]:
    """Files below a folder, without following links to folders, which may form cycles."""
    for folder, _, names in os.walk(root / below):
        for name in names:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)


def _put_local(path: Path, data: bytes) -> None:
    """Write under another name first, so that a crash leaves no incomplete file under the final name."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
