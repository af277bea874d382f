"""Which variables may be tried from start to start: none that changes results, a job's peers, or the code loaded.

Every rank checks by itself, since a proposal comes from the job's store, where other processes may write.
"""

from __future__ import annotations

import re
from typing import Final

PREFIXES: Final = ("NCCL_", "FI_", "OFI_", "UCX_")
"""Names of variables of NCCL and of its network plugins begin with one of these."""
TUNABLE: Final = re.compile(rf"(?:{'|'.join(PREFIXES)})[A-Z0-9_]+")
REFUSED: Final = (
    (r"NCCL_(?:ALGO|PROTO|ZEROTUNE)", "zerotune chooses algorithm and protocol of each call by itself"),
    (
        r"\w+_(?:PLUGIN|DEBUG|LOG|DUMP|TELEMETRY|FILE|PATH|DIR|CONF)|NCCL_NET(?!_)",
        "it says which code, log or file is used"),
    (r"\w+_(?:FLUSH|CHECKS?|MONITOR)", "results may become wrong with it"),
    (
        r"\w+_(?:IFNAME|HCA|ID|HOSTID|IF|IFACE|INTERFACE|ADDR|URL|DEVICES?|NAME|PROVIDER|FAMILY|PORT|PORTS)"
        r"|\w+_(?:GID|PKEY|KEY|AUTH|VNI|DOMAIN|OOB)|NCCL_\w*TLS",
        "it says whom a job talks to, and by which way",
    ),
)
"""(names, also with a suffix after an underscore; why a user's list must not contain them)."""


def why_refused(variable: str) -> str:
    """Why this variable must not be tried; empty: it may."""
    if not TUNABLE.fullmatch(variable):
        return "its name does not begin with NCCL_, FI_, OFI_ or UCX_ in capitals"
    return next((why for name, why in REFUSED if re.fullmatch(rf"(?:{name})(?:_\w*)?", variable)), "")
