"""What hardware and NCCL this job runs on, as one identity: knowledge is shared under it.

Two jobs share a fabric_id when GPU model, GPUs per node, node count, link type, driver, NCCL version
and every NCCL_* setting are equal: anything that could change what a setting costs.
"""

from __future__ import annotations

import hashlib
import json
import os

import torch
import torch.distributed as dist

Description = dict[str, str | int | float | bool]

# These vary from run to run without changing what a collective costs.
NEUTRAL_SETTINGS = (
    "NCCL_DEBUG",
    "NCCL_TUNER_",
    "NCCL_PROFILER_",
    "NCCL_COMM_ID",
    "NCCL_HOSTID",
    "NCCL_INSPECTOR",
    "NCCL_ZEROTUNE",
)


def describe(fabric: str | None) -> tuple[str, Description]:
    """(fabric_id, description) of the emulated fabric named `fabric`, or of this node's hardware."""
    if fabric is not None:
        from zerotune.agent.nccl.fabric import load

        emulated = load(fabric)
        limit_mb = os.environ.get("ZEROTUNE_DEVICE_MB")  # checked where the emulation reads it
        return emulated.fabric_id, emulated.describe() | ({"device_mb": float(limit_mb)} if limit_mb else {})
    description = _hardware()
    canonical = json.dumps(description, sort_keys=True).encode()
    return hashlib.sha256(canonical).hexdigest()[:16], description


def nccl_version() -> int:
    """NCCL's version as NCCL encodes it (22809 for 2.28.9); 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def _hardware() -> Description:
    world_size = dist.get_world_size()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    description: Description = {
        "n_ranks_per_node": local_size,
        "n_nodes": max(1, world_size // max(1, local_size)),
        "nccl_version": nccl_version(),
    }
    for name, value in sorted(os.environ.items()):
        if name.startswith("NCCL_") and not name.startswith(NEUTRAL_SETTINGS):
            description[name] = value
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        description["gpu"] = properties.name
        description["compute_capability"] = properties.major * 10 + properties.minor
        description["device_mb"] = round(properties.total_memory / 1e6)
        description.update(_nvml_description())
    return description


def _nvml_description() -> Description:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        n_links = 0
        for link in range(18):
            try:
                n_links += int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
            except pynvml.NVMLError:
                break
        return {"driver": str(pynvml.nvmlSystemGetDriverVersion()), "n_nvlinks": n_links}
    except Exception:  # without it the identity tells fewer machines apart, but is never wrong
        return {}
