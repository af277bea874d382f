"""Puts the mock under torch's CUDA libraries, right before torch is imported."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Final

from benchmarks.rehearse.device_functions import device_functions
from benchmarks.rehearse.mock_gpu import HOST_US, MockGpu
from benchmarks.rehearse.prices import Prices
from benchmarks.rehearse.settings import Rehearsal
from benchmarks.rehearse.timing_source import mark_records_emulated
from zerotune.agent.nccl.libnccl import LIBRARY, LIBRARY_VARIABLE, Libnccl
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.mock_cuda.mock import Patched
from zerotune.store.errors import UserError

_BLAS: Final = ("libcublasLt.so.*", "libcublas.so.*")
_HOST: Final = "rehearsal-"
FREED_MEMORY_WAS_USED: Final = 3
"""Exit code of a process whose kernels used memory that was freed, whatever else it would have said."""
_started: list[MockGpu] = []


def start() -> None:
    """Once per process.

    Raises:
        UserError: torch's CUDA libraries are not there, or the rehearsal makes no sense.
        PluginError: the mock cannot be built or put into them.
    """
    if _started:
        return
    rehearsal = Rehearsal.from_environment(os.environ)
    fabric = rehearsal.fabric
    runtime = _library("libcudart.so.*")
    mock = MockGpu(in_front=True)
    machine = read_machine(Path(os.environ["NCCL_TOPO_FILE"])).with_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    # torchrun's node, unless the program says which hosts its ranks are to be, and how they reach each other
    host = os.environ.get("NCCL_HOSTID", "")
    if not host or host.startswith(_HOST):  # torchrun imports torch, too, and its ranks inherit what that set
        host = f"{_HOST}{fabric.name}-{os.environ.get('GROUP_RANK', '0')}"
    net_plugin = os.environ.get("NCCL_NET_PLUGIN")
    cuda_version = int(runtime.suffix[1:]) * 1000 + (90 if runtime.suffix == ".12" else 0)
    mock.set_machine(machine, host, cuda_version)
    if net_plugin is not None:
        os.environ["NCCL_NET_PLUGIN"] = net_plugin
    ctypes.CDLL("libcuda.so.1")  # by this name it is found from now on
    mock.replace_exports(runtime, ctypes.CDLL(str(runtime)), "cuda", Patched.runtime)
    mock.replace_exports(runtime, ctypes.CDLL(str(runtime)), "__cudaRegisterFunction", Patched.runtime)
    for pattern in _BLAS:
        path = _library(pattern)
        mock.replace_exports(path, ctypes.CDLL(str(path)), "cublas", Patched.blas)
    mock.set_node(zlib.crc32(host.encode()) & 0x7FFFFFFF)
    mock.set_most_bytes(int(rehearsal.moves_mb * 1e6))
    mock.set_queue(rehearsal.ahead)
    if limits := fabric.nccl_algo():
        os.environ.setdefault("NCCL_ALGO", limits)
    path = Path(os.environ.get(LIBRARY_VARIABLE) or _library(LIBRARY))  # torch takes what has this name already
    nccl = Libnccl(path)
    base = mock.attach(path, nccl.library, nccl.version)
    mock.stand_in_front_of(nccl.library)
    compute, slower = fabric.compute, rehearsal.slower
    mock.set_prices(
        Prices(fabric, device_functions(path, base), slower),
        noise=fabric.noise.sigma,
        kernel_us=compute.launch_us * slower,
        flops_per_ns=compute.tflops * compute.efficiency * 1000.0 / slower,
        host_us=HOST_US * slower,
    )
    mark_records_emulated(os.environ.get("NCCL_PROFILER_PLUGIN", ""))
    atexit.register(_fail_if_freed_memory_was_used, mock)
    _started.append(mock)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"zerotune: a rehearsal on {fabric.name} with NCCL {nccl.version_text}: nothing is computed, and "
            "no time is a GPU's",
            file=sys.stderr,
        )


def _fail_if_freed_memory_was_used(mock: MockGpu) -> None:
    if n_uses := mock.n_freed_uses():
        text = f"zerotune: {n_uses} kernels and copies of this rehearsal used memory that was freed: it failed"
        print(text, file=sys.stderr)
        sys.stdout.flush()
        os._exit(FREED_MEMORY_WAS_USED)  # nothing else changes a process's exit code at its end


def _library(pattern: str) -> Path:
    """One of torch's CUDA libraries."""
    found = sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob(f"*/lib/{pattern}"))
    if not found:
        raise UserError(f"torch brings no {pattern} here", "install a build of torch for CUDA, from PyPI for example")
    return found[-1]
