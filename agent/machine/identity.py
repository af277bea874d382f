"""The fabric_id: the identity of a job's hardware and NCCL, under which measurements are shared.

Two jobs share a fabric_id if everything that changes a setting's cost is equal: GPUs and their links, network adapters,
NCCL's version and its variables that change costs. The fabric_id excludes whatever differs between nodes or jobs on one
machine. Each measurement has its own number of ranks and nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os

import torch
import torch.distributed as dist

from . import adapters, launchers, nccl_variables

Description = dict[str, str | int | float | bool]


def describe(fabric: str | None) -> tuple[str, Description]:
    """(fabric_id, description) of the emulated fabric named `fabric`, or of this node's hardware."""
    if fabric is not None:
        from ..nccl.fabric import load

        emulated = load(fabric)
        facts = emulated.describe() | emulated.variables(os.environ)
        limit_mb = os.environ.get("ZEROTUNE_DEVICE_MB")  # checked when the emulation starts
        return emulated.id_under(os.environ), facts | ({"device_mb": float(limit_mb)} if limit_mb else {})
    hardware, world_size = _hardware(), dist.get_world_size()
    canonical = json.dumps(hardware, sort_keys=True).encode()
    local_size = launchers.local_size(os.environ, world_size)
    job: Description = {"n_ranks_per_node": local_size, "n_nodes": max(1, world_size // max(1, local_size))}
    return hashlib.sha256(canonical).hexdigest()[:16], hardware | job


def nccl_version() -> int:
    """The loaded NCCL's version as NCCL encodes it (22809 for 2.28.9), not the one torch was built with; 0: none."""
    if not torch.cuda.is_available():
        return 0
    with contextlib.suppress(OSError, AttributeError):  # torch may contain NCCL
        loaded, version = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD), ctypes.c_int()
        if loaded.ncclGetVersion(ctypes.byref(version)) == 0:
            return version.value
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def _hardware() -> Description:
    variables = nccl_variables.in_effect(os.environ)
    description: Description = {
        "nccl_version": nccl_version(),
        "adapters": adapters.described(variables),
        **nccl_variables.cost_variables(variables),
    }
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
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        return {"n_nvlinks": n_links, "pcie": f"{generation}.0 x{pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}"}
    except Exception:  # without NVML the identity distinguishes fewer machines, but is never wrong
        return {}
