"""Asking a daemon how it is, and showing the answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from agent.keys import connect
from store import wire
from store.errors import WireError

if TYPE_CHECKING:
    from rich.console import Console


def fetch_status(endpoint: str, timeout_s: float = 2.0, *, curve_dir: Path | None = None) -> wire.StatusReply | None:
    """The state of the daemon at `endpoint`; None when none answers in time.

    Raises:
        UserError: the endpoint needs keys, and `curve_dir` (default: ZEROTUNE_CURVE_KEYS) lacks one.
    """
    scheme, _, place = endpoint.partition("://")
    if scheme == "ipc" and not Path(place).exists():
        return None
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        try:
            connect(socket, endpoint, curve_dir)
            socket.send_multipart(wire.encode(wire.StatusRequest()))
            if not socket.poll(int(timeout_s * 1000)):
                return None
            reply = wire.decode_daemon(socket.recv_multipart())
        except (zmq.ZMQError, WireError):
            return None
    return reply if isinstance(reply, wire.StatusReply) else None


def render_status(reply: wire.StatusReply, console: Console) -> None:
    """Print the daemon's state as tables."""
    from rich.filesize import decimal
    from rich.table import Column, Table

    console.print(
        f"daemon {reply.version} (pid {reply.daemon_pid}) at {reply.endpoint}, up {reply.uptime_s:.0f} s,"
        f" {decimal(reply.resident_bytes)}, {reply.n_errors} failures of its own,"
        f" {reply.n_refused} bad messages refused\nstore {reply.store_path}",
        highlight=False,
    )
    if not reply.jobs:
        console.print("no job is connected")
        return
    fabric = Column("fabric", overflow="fold")
    table = Table("job", fabric, "stage", "ranks", "epoch", "step", "step ms", "obs/s", "dropped", "explored",
                  "budget spent %", "heard", "health")  # fmt: skip
    for job in reply.jobs:
        table.add_row(
            job.job_id, job.fabric_id, job.stage.name, f"{job.n_ranks_seen}/{job.n_ranks}", str(job.epoch),
            str(job.step), f"{job.step_us / 1000:.2f}", f"{job.observations_per_s:.0f}", str(job.n_dropped),
            str(job.n_explored), f"{job.exploration_spent_percent:.2f}", f"{job.heard_s_ago:.1f} s ago", job.health,
        )  # fmt: skip
    console.print(table)
    for job in reply.jobs:
        for line in job.last_decisions:
            console.print(f"{job.job_id}: {line}", highlight=False, soft_wrap=True)
