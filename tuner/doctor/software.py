"""Checks of Python, torch, the compiler and the GPUs."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Final

from ...agent.nccl.compiled import PLUGIN
from ...store.errors import PluginError
from .findings import Finding, Machine, ok, problem, warning

NEWEST_PYTHON: Final = (3, 13)
OLDEST_TORCH: Final = (2, 6)


def python(machine: Machine) -> Finding:
    """The Python that runs this; training should use the same one."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        return warning(
            "python", found, f"zerotune was not tested with it: use Python 3.10 to {newest} if anything fails"
        )
    return ok("python", found)


def torch(machine: Machine) -> Finding:
    """This environment's torch, by its metadata, since loading it takes seconds."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return problem(
            "torch", "not in this environment", "install zerotune into the environment that trains, beside its torch"
        )
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_TORCH:
        return problem("torch", version, f"install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer")
    return ok("torch", version)


def compiler(machine: Machine) -> Finding:
    """The C compiler; needed only without a built plugin, and for the emulated NCCL."""
    try:
        return ok("compiler", " ".join(PLUGIN.compiler()))
    except PluginError as error:
        remedy = "install gcc or clang, or name one in CC"
        if PLUGIN.path() is None:
            return problem("compiler", str(error), remedy)
        return warning(
            "compiler", "none; the tuner plugin is built already", f"{remedy}: the emulated NCCL may need it"
        )


def gpu(machine: Machine) -> Finding:
    """The GPUs that NVML reports; a machine without any is fine."""
    try:
        names, driver = gpus_and_driver()
    except ImportError:
        return warning("gpu", "unknown: the Python package nvidia-ml-py is missing", "install nvidia-ml-py")
    except Exception as error:  # this binding may raise anything without a driver
        found = f"none ({error})" if str(error) else "none"
        return ok("gpu", f"{found}: train on the emulated NCCL with `zerotune launch --fabric NAME`")
    return ok("gpu", f"{names or 'none'}, driver {driver}")


def gpus_and_driver() -> tuple[str, str]:
    """The GPUs, such as `8 x NVIDIA H100`, and the driver's version. Raises NVML's errors without a driver."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        names = [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)), driver


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
