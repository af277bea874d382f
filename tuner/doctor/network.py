"""Check of the network: whether NCCL would use TCP although there are faster adapters."""

from __future__ import annotations

from .devices import adapters, gpus, is_efa, out_of_use
from .findings import Finding, Machine, ok, problem, warning
from .probing import probe

VERBS = ("libibverbs.so", "libibverbs.so.1")
"""Libraries that NCCL opens for InfiniBand and RoCE."""


def network(machine: Machine) -> Finding | None:
    """The network that NCCL would use between nodes."""
    root, variables = machine.root, machine.nccl_variables()
    if not gpus(root):
        return None
    rdma = [one for one in adapters(root) if not is_efa(one)]
    used = [one.name for one in rdma if not out_of_use(root, one, variables)]
    is_named = [why for one in rdma if (why := out_of_use(root, one, variables)).startswith("NCCL_IB_HCA")]
    foreign = [one.name for one in adapters(root) if is_efa(one)]
    foreign += [one.name for one in sorted((root / "sys/class/cxi").glob("*"))]
    chosen = variables.get("NCCL_NET", "").lower()
    if chosen == "ib" and not used:
        found = f"{machine.stated('NCCL_NET')}, and there is no RDMA adapter that NCCL may use"
        return problem("network", found, "unset NCCL_NET: NCCL ends such jobs")
    if not used and not is_named and not foreign:
        return None
    here = " ".join((*foreign, *used)) or " ".join(one.name for one in rdma)
    if chosen == "socket":
        return warning("network", f"{machine.stated('NCCL_NET')} makes NCCL use TCP, though {here} is here", "unset it")
    if foreign:
        return _of_plugin(here, variables.get("NCCL_NET_PLUGIN", ""))
    if variables.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        setting = machine.stated("NCCL_IB_DISABLE")
        return warning("network", f"{setting} makes NCCL use TCP, though {here} is here", "unset it")
    if not used:
        found = f"{machine.stated('NCCL_IB_HCA')} names no active adapter of this machine, so NCCL uses TCP: {here}"
        return warning("network", found, "unset NCCL_IB_HCA, or name those that are here")
    if not any(probe(one).path for one in VERBS):
        found = f"libibverbs cannot be loaded, so NCCL uses TCP, though {here} is here"
        return warning("network", found, "install libibverbs (Debian: apt install libibverbs1 ibverbs-providers)")
    return ok("network", f"RDMA by {here}")


def _of_plugin(here: str, named: str) -> Finding:
    """The finding for EFA and Slingshot, for which NCCL needs a libfabric plugin."""
    if named.lower() == "none":
        found = f"NCCL_NET_PLUGIN={named} makes NCCL use TCP, though {here} is here"
        return warning("network", found, "unset NCCL_NET_PLUGIN")
    names = [one for one in named.split(",") if one]
    tried = [each for one in names for each in (one, f"libnccl-net-{one}.so")] or ["libnccl-net.so"]
    if path := next((opened.path for one in tried if (opened := probe(one)).path), ""):
        return ok("network", f"{here}, by {path}")
    found = f"NCCL's plugin for {here} cannot be loaded ({' '.join(tried)}), so NCCL uses TCP"
    if probe("libnccl-net-ofi.so").path:
        return warning("network", found, "set NCCL_NET_PLUGIN=ofi")
    return warning("network", found, "install aws-ofi-nccl, and name its folder in LD_LIBRARY_PATH")
