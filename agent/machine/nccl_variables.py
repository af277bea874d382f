"""Variables of NCCL and its network plugins that change what a collective costs, as they are in effect.

NCCL's are listed one by one. Other variables, mostly names of interfaces and paths, may differ between nodes or jobs on
one machine. Of the plugins' variables, those count that may be tuned (`tunable_variables`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .tunable_variables import PREFIXES, why_refused

SYSTEM_FILE: Final = Path("/etc/nccl.conf")
NAMES: Final = """
    ALGO PROTO NTHREADS LL128_NTHREADS BUFFSIZE LL_BUFFSIZE LL128_BUFFSIZE MIN_NCHANNELS MAX_NCHANNELS
    MIN_NRINGS MAX_NRINGS MIN_CTAS MAX_CTAS NCHANNELS_PER_NET_PEER MIN_P2P_NCHANNELS MAX_P2P_NCHANNELS
    NCHANNELS_PER_PEER CGA_CLUSTER_SIZE CTA_POLICY THREAD_THRESHOLDS P2P_DISABLE P2P_LEVEL P2P_DIRECT_DISABLE
    P2P_USE_CUDA_MEMCPY P2P_NET_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PXN_LEVEL PXN_DISABLE
    SHM_DISABLE SHM_USE_CUDA_MEMCPY SHM_LOCALITY NVB_DISABLE NET NET_SHARED_BUFFERS NET_SHARED_COMMS
    NET_GDR_LEVEL NET_GDR_READ NET_GDR_C2C NET_DISABLE_INTRA DMABUF_ENABLE CROSS_NIC NETDEVS_POLICY
    COLLNET_ENABLE COLLNET_NODE_THRESHOLD NVLS_ENABLE NVLS_NCHANNELS NVLS_CHUNKSIZE NVLSTREE_MAX_CHUNKSIZE
    PAT_ENABLE MNNVL_ENABLE MNNVL_CLIQUE_ID WIN_ENABLE IB_DISABLE IB_TC IB_SL IB_GID_INDEX IB_QPS_PER_CONNECTION
    IB_SPLIT_DATA_ON_QPS IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_PCI_RELAXED_ORDERING IB_MERGE_NICS IB_MERGE_VFS
    IB_USE_INLINE IB_CUDA_SUPPORT IB_GDR_FLUSH_DISABLE IB_FIFO_TC IB_MTU NET_MERGE_LEVEL NET_FORCE_MERGE
    SOCKET_NTHREADS NSOCKS_PERTHREAD IGNORE_DISABLED_P2P GDRCOPY_ENABLE TOPO_FILE GRAPH_FILE
"""
COSTS: Final = frozenset(f"NCCL_{name}" for name in NAMES.split())
FILES: Final = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE")
"""Variables that name files: the files' contents count, not their paths."""
LINE: Final = re.compile(r"^\s*(NCCL_\w+)\s*=\s*([^#\n]*?)\s*(?:#.*)?$", re.MULTILINE)
MOST_BYTES: Final = 1 << 20
"""How much of a file is read."""


def in_effect(environment: Mapping[str, str], system_file: Path = SYSTEM_FILE) -> dict[str, str]:
    """Variables of NCCL and its network plugins: the environment overrides files, the user's file the system's."""
    own = environment.get("NCCL_CONF_FILE") or str(Path(environment.get("HOME", "/")) / ".nccl.conf")
    found: dict[str, str] = {}
    for path in (system_file, Path(own)):
        found |= LINE.findall(_text(path))
    return found | {name: value for name, value in environment.items() if name.startswith(PREFIXES)}


def cost_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what collectives cost, with normalised values."""
    names = (name for name in variables if name in COSTS or (not name.startswith("NCCL_") and not why_refused(name)))
    found = {name: variables[name].strip().lower() for name in sorted(names)}
    for name in FILES:
        if name in variables:
            found[name] = hashlib.sha256(_text(Path(variables[name])).encode()).hexdigest()[:16]
    return found


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
