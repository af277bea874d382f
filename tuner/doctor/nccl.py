"""Checks of NCCL, our plugin, and other plugins that may take its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...agent.launch import OLDEST_NCCL
from ...agent.nccl import other_plugins as others
from ...agent.nccl import pinning
from ...agent.nccl.compiled import PLUGIN
from ...agent.nccl.libnccl import LIBRARY, candidates
from ...agent.nccl.release import Release
from ...store.errors import PluginError, UserError
from .findings import Finding, Machine, of_error, ok, problem, warning
from .probing import Probed, probe

OLDEST_TIMED: Final = (2, 26)
"""Oldest release that times kernels; older ones time only the host's enqueue, or nothing."""
PIN_COST: Final = "on recorded machines 0 to 77 % of such settings took twice NCCL's own time or more"
_LAYOUT: Final = "zerotune_layout_version"


def plugin(machine: Machine) -> Finding:
    """Whether the tuner plugin is built and loads."""
    path = PLUGIN.path()
    if path is None:
        try:
            PLUGIN.compiler()
        except PluginError:
            return problem("plugin", "not built, and there is no C compiler", "install gcc, or a wheel with the plugin")
        return ok("plugin", "not built yet: the first launch builds it")
    loaded = probe(str(path), _LAYOUT)
    if loaded.error or not loaded.symbols:
        why = loaded.error or "it is not zerotune's plugin"
        return problem("plugin", f"{path} cannot be loaded: {why}", "remove it: the next launch builds it anew")
    return ok("plugin", str(path))


def nccl(machine: Machine) -> Finding:
    """The NCCL that training would load, and the newest plugin interfaces that both it and our plugin have."""
    failures = []
    for origin, loaded in _probed(machine):
        if loaded.nccl_version:
            return _of_release(origin, loaded)
        failures.append(f"{origin}: {loaded.error or 'it has no ncclGetVersion'}")
    if len(failures) > 1:  # besides the loader, which found none
        return problem("nccl", "; ".join(failures[:-1]), "install torch's own NCCL package anew")
    return warning(
        "nccl",
        "none found: no package of torch's, none named in NCCL_LIBRARY, none that the dynamic loader knows",
        "without a GPU train on the emulated NCCL: `zerotune launch --fabric NAME`; with one install torch for CUDA",
    )


def nccl_version(machine: Machine) -> str:
    """Version of the NCCL that training would load; empty: there is none."""
    codes = (loaded.nccl_version for _, loaded in _probed(machine))
    return next((".".join(map(str, _numbers(code))) for code in codes if code), "")


def _probed(machine: Machine) -> Iterator[tuple[str, Probed]]:
    """Each NCCL that training may load, and its origin; the dynamic loader's own is last."""
    for origin, library in (*candidates(machine.environment), ("the system's", LIBRARY)):
        yield origin, probe(library)


def _numbers(code: int) -> tuple[int, ...]:
    return (code // 10_000, code // 100 % 100, code % 100) if code >= 10_000 else (code // 1000, code // 100 % 10)


def _of_release(origin: str, loaded: Probed) -> Finding:
    version = _numbers(loaded.nccl_version)
    release, name = Release(version), ".".join(map(str, version))
    found = f"{name}, {origin} ({loaded.path})"
    if version < OLDEST_NCCL:
        oldest = ".".join(map(str, OLDEST_NCCL))
        return problem("nccl", f"{found}: no tuner interface that is supported", f"use NCCL {oldest} or newer")
    profiler = f"profiler v{release.profiler_abi}" if release.profiler_abi else "no profiler"
    found = f"{found}: tuner v{release.tuner_abi}, {profiler}"
    if version < OLDEST_TIMED:
        oldest = ".".join(map(str, OLDEST_TIMED))
        return warning("nccl", found, f"it times no kernels, so nothing is learned: use NCCL {oldest} or newer")
    return ok("nccl", found)


def other_plugins(machine: Machine) -> Finding:
    """Other tuners and profilers; NCCL itself loads only one of each."""
    named = dict(others.user_plugins(machine.environment))
    found, wrong = [], []
    for kind, place, symbol in (
        ("tuner", others.TUNER, "ncclTunerPlugin"),
        ("profiler", others.PROFILER, "ncclProfiler"),
    ):
        name = named.get(place, "")
        opened = _opened(kind, symbol, name)
        if opened.symbols:
            found.append(f"{kind} {opened.path}: runs beside ours")
        elif name and name != "STATIC_PLUGIN":
            wrong.append(place.variable)
            found.append(f"{kind} {name}: {opened.error or 'it has no interface that is supported'}")
    if wrong:
        remedy = f"mend {' and '.join(wrong)}, or unset: training runs without"
        return warning("other_plugins", "; ".join(found), remedy)
    return ok("other_plugins", "; ".join(found) or "none")


def _opened(kind: str, symbol: str, name: str) -> Probed:
    """The plugin of this kind that NCCL would open: by path, file name or short name; empty: by its own search."""
    candidates = (name, f"libnccl-{kind}-{name}.so") if name else (f"libnccl-{kind}.so",)
    probed = [probe(each, *(f"{symbol}_v{version}" for version in range(1, 8))) for each in candidates]
    return next((each for each in probed if each.path), probed[0])


def pins(machine: Machine) -> Finding:
    """The choices that the user's own settings leave to NCCL."""
    variables = machine.nccl_variables()
    pinned = [name for name in pinning.PINNING if variables.get(name)]
    if not pinned:
        return ok("pins", "neither NCCL_ALGO nor NCCL_PROTO is set")
    found, names = " ".join(map(machine.stated, pinned)), " and ".join(pinned)
    try:
        unserved = pinning.unserved(variables)
    except UserError as error:
        return of_error("pins", error)
    if unserved:
        what = " and ".join(one.name for one in unserved)
        return problem("pins", f"{found} leaves no algorithm to {what}", f"unset {names}: NCCL ends such jobs")
    return warning("pins", f"{found}: {PIN_COST}", f"only what it allows can be tuned: unset {names} to tune all")
