"""Two nodes of one machine: network namespaces with a link, and an address that only a `BadLine` joins."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zerotune.store.errors import UserError

LINK: Final = "train"
"""The interface between the nodes, in both."""
LEADER: Final = "10.72.0.1"
"""An address that each node takes for its own: `bad_line_worker` brings the second's connections to the first."""


@dataclass(frozen=True)
class Namespace:
    name: str
    address: str
    """On the link."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that runs there."""
        return ("ip", "netns", "exec", self.name)

    @property
    def path(self) -> Path:
        return Path("/run/netns") / self.name


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Both nodes, which are removed afterwards. Raises UserError if this user or machine has no network namespaces."""
    mark = secrets.token_hex(4)
    first, second = (Namespace(f"zt-{mark}-{n}", f"10.71.0.{n}") for n in (1, 2))
    try:
        for node in (first, second):
            _ip("netns", "add", node.name)
        _ip("link", "add", LINK, "netns", first.name, "type", "veth", "peer", "name", LINK, "netns", second.name)
        for node in (first, second):
            for device, address in (("lo", f"{LEADER}/32"), (LINK, f"{node.address}/24")):
                _ip("-n", node.name, "addr", "add", address, "dev", device)
                _ip("-n", node.name, "link", "set", device, "up")
        yield first, second
    finally:
        for node in (first, second):
            if node.path.exists():
                _ip("netns", "del", node.name)


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"no network namespaces: {error}", "install iproute2, or do with one node") from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"no network namespaces: {error.stderr.strip()}", "run as root, or do with one node") from error
