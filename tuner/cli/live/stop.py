"""`zerotune daemon stop`."""

from __future__ import annotations

import os
import signal
import time
from typing import Final

from ....store.errors import UserError
from ..options import AsJson, CurveKeys, Endpoint, print_json
from ..paths import endpoint_or_default

PATIENCE_S: Final = 20.0
"""Time for a daemon to store its messages before it ends."""


def stop(endpoint: Endpoint = None, curve_keys: CurveKeys = None, as_json: AsJson = False) -> None:
    """End this node's daemon cleanly; jobs train on without it.

    Example: zerotune daemon stop
    """
    import psutil

    from ....agent.daemon_link.node_service import has_service
    from ...client.holders import holder_of
    from ...client.status import fetch_status, no_answer

    where = endpoint_or_default(endpoint)
    holder = holder_of(where)
    reply = fetch_status(where, timeout_s=2.0, curve_dir=curve_keys)
    if holder is None and reply is None:
        if where.startswith("tcp://"):
            raise no_answer(where, None)
        remedy = "the service for all users ends by SIGTERM" if has_service() else "there is nothing to stop"
        raise UserError(f"no daemon answers at {where}", remedy)
    pid = holder.pid if holder is not None else reply.daemon_pid if reply is not None else 0
    try:
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)  # a stopped process does not see the first
        process.wait(PATIENCE_S)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass
    except PermissionError as error:
        raise UserError(f"daemon {pid} is another user's", "ask them, or root, to end it") from error
    except psutil.TimeoutExpired as error:
        raise UserError(f"daemon {pid} has not ended within {PATIENCE_S:.0f} s", f"kill -9 {pid} ends it") from error
    deadline_s = time.monotonic() + PATIENCE_S
    while holder_of(where) is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    print_json({"stopped": pid}) if as_json else print(f"daemon {pid} has ended")
