"""The libraries in C: their sources, and where they are compiled to.

A wheel for this platform contains them. Otherwise they are compiled on first use: beside their sources in a checkout,
below `$XDG_CACHE_HOME/zerotune` in an installation. A library runs as this user, so a folder where another user could
have put one is refused. setup.py uses this module, so it imports the standard library only, as do its imports.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...store.errors import PluginError, UntrustedError, reason
from ...store.foreign.regular_file import read_file
from ...store.foreign.ways import SESSION_DIRS, make_own_folder, refuse_reachable

_HASH_MARK: Final = b"zerotune-source:"
_MAX_BYTES: Final = 64 * 2**20
_FLAGS: Final = "plugin/compile_flags.txt"
_REMEDY: Final = "install gcc or clang (Debian: apt install gcc libc6-dev) or name one in CC"
_INSTALLATIONS: Final = frozenset({"site-packages", "dist-packages"})
_ELSEWHERE: Final = "set XDG_CACHE_HOME to a folder of your own, which nobody else may write to"


@dataclass(frozen=True)
class SharedLibrary:
    """One library; its paths are relative to `root`, and may be patterns."""

    name: str
    file: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    """In addition to those in the file `compile_flags`."""
    headers: tuple[str, ...] = ("plugin/**/*.h",)
    root: Path = Path(__file__).parent
    compile_flags: str = _FLAGS

    def path(self) -> Path | None:
        """The library built from exactly these sources; None: it is not built."""
        source_hash = self.source_hash()
        if _is_current(beside := self.root / self.file, source_hash):
            return beside
        cached = self._cached(source_hash)
        try:
            refuse_reachable(cached, self.name, _ELSEWHERE)
        except (UntrustedError, OSError):
            return None  # anybody could forge the hash in a library
        return cached if _is_current(cached, source_hash) else None

    def build(self) -> Path:
        """Compile the library unless a current one exists; returns its path.

        Several processes may build at the same time. A library in use is never written to.

        Raises:
            PluginError: there is no compiler, it failed, or there is no safe folder to write to.
        """
        if (current := self.path()) is not None:
            return current
        beside = self.root / self.file
        source_hash = self.source_hash()
        library = beside if may_hold_builds(beside.parent) else self._cached(source_hash)
        try:
            if library != beside:
                make_own_folder(library.parent, self.name, _ELSEWHERE)
            with _locked(library.with_name(f".{library.name}.lock")):
                if self.path() is None:
                    self.compile_to(library)
        except UntrustedError as error:
            raise PluginError(str(error)) from error
        except OSError as error:
            problem = f"{self.name} cannot be written to {library.parent}: {reason(error)}"
            raise PluginError(f"{problem}; {_ELSEWHERE}") from error
        return library

    def compile_to(self, library: Path) -> None:
        """Compile to a temporary name and rename, so that no other process sees half a library; raises like `build`."""
        temporary = library.with_name(f".{library.name}.{uuid.uuid4().hex[:8]}")
        command = [
            *self.compiler(),
            f"@{self.root / self.compile_flags}",
            *self.flags,
            f'-DZT_SOURCE_HASH="{self.source_hash()}"',
            *("-shared", "-Wl,-z,nodelete", "-o", str(temporary)),
            *(str(file) for file in self._files(*self.sources)),
            "-ldl",  # a part of libc from glibc 2.34 on
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                detail = (done.stderr.strip() or f"exit status {done.returncode}")[-2000:]
                raise PluginError(f"{self.name} cannot be built: {command[0]} failed: {detail}; {_REMEDY}")
            temporary.replace(library)
        finally:
            temporary.unlink(missing_ok=True)

    def _files(self, *patterns: str) -> list[Path]:
        return sorted(file for pattern in patterns for file in self.root.glob(pattern))

    def source_hash(self) -> str:
        """A hash of sources, headers and flags: equal on nodes with equal sources, whatever their compilers."""
        digest = hashlib.sha256(" ".join(self.flags).encode())
        for file in self._files(*self.sources, *self.headers, self.compile_flags):
            digest.update(file.relative_to(self.root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
        return digest.hexdigest()[:16]

    def _cached(self, source_hash: str) -> Path:
        return cache_folder() / source_hash / Path(self.file).name

    def compiler(self) -> list[str]:
        """The C compiler's command; raises `PluginError` if there is none, or not the one that CC names."""
        named = shlex.split(os.environ.get("CC", ""))
        for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
            if shutil.which(command[0]) is not None:
                return command
        found = f"CC names {named[0]}, which is not there" if named else "no C compiler found"
        raise PluginError(f"{self.name} cannot be built: {found}; {_REMEDY}")


def cache_folder() -> Path:
    """The folder for compiled libraries; `make_own_folder` creates and checks it.

    A user without a home directory gets a folder that only root can create.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        folder = Path(SESSION_DIRS) / str(os.getuid())
    return folder.absolute() / "zerotune"


def may_hold_builds(folder: Path) -> bool:
    """Whether libraries may be written to `folder`, beside their sources: only in a writable checkout.

    Not in an installation: pip removes only the files that it installed, and a folder left behind would hide the
    package that is installed next.
    """
    return _INSTALLATIONS.isdisjoint(folder.parts) and os.access(folder, os.W_OK)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # NFS may have no locks: then each process compiles
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_current(library: Path, source_hash: str) -> bool:
    try:
        return _HASH_MARK + source_hash.encode() in read_file(library, _MAX_BYTES)
    except OSError:
        return False


PLUGIN: Final = SharedLibrary(
    "the tuner plugin",
    "plugin/libnccl-tuner-zerotune.so",
    ("plugin/**/*.c",),
    flags=("-Wl,-soname,libnccl-tuner-zerotune.so",),
)
"""Its SONAME lets NCCL find it by its name after it was loaded."""
EMULATED_NCCL: Final = SharedLibrary(
    "the emulated NCCL",
    "emulated/libzerotune-emulated.so",
    ("emulated/**/*.c", "plugin/version.c"),
    flags=("-fvisibility=default",),
)
MOCK_CUDA: Final = SharedLibrary(
    "the mock CUDA",
    "mock_cuda/libzerotune-mock-cuda.so",
    ("mock_cuda/library/*/*.c", "plugin/version.c"),
    flags=("-Wl,-soname,libnvidia-ml.so.1",),
    headers=("mock_cuda/library/**/*.h", "plugin/**/*.h"),
)
"""Its SONAME is NVML's, so that NCCL and pynvml find it after it was loaded."""
