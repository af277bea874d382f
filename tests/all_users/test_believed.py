"""What root believes of what a process of a user's says: it may say anything."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zerotune.store.wire import StatusReply
from zerotune.tuner.cli.live.all_users import plausible_reply

PATH = Path("/run/zerotune/23002/daemon.sock")
HONEST: dict[str, Any] = msgspec.to_builtins(
    StatusReply(os.getpid(), "0.1", f"ipc://{PATH}", "/var/lib/zerotune/23002/store.db", 1.0, 1 << 20, 0)
)


def test_a_users_own_daemon_is_believed():
    assert plausible_reply(msgspec.json.encode(HONEST), os.getuid(), PATH) == msgspec.convert(HONEST, StatusReply)


@pytest.mark.parametrize(
    "lie",
    [
        {"endpoint": "ipc:///run/zerotune/23003/daemon.sock"},
        {"resident_bytes": 10**400},
        {"uptime_s": 10**400},
        {"store": {"n_waiting": -(10**30)}},
        {"jobs": 7},
    ],
)
def test_answers_with_impossible_values_are_not_believed(lie: dict[str, Any]):
    assert plausible_reply(json.dumps(HONEST | lie).encode(), os.getuid(), PATH) is None


@pytest.mark.parametrize("said", [b"", b"[" * 100_000, b'{"type": ' + b"9" * 10_000 + b"}", b"\xff\xfe"])
def test_bytes_that_are_no_answer_are_not_believed(said: bytes):
    assert plausible_reply(said, os.getuid(), PATH) is None


def test_nobody_makes_root_end_anothers_process():
    """Root is told what to kill by that number."""
    assert plausible_reply(msgspec.json.encode(HONEST), os.getuid() + 1, PATH) is None
