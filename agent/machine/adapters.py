"""The network adapters that NCCL would use, counted by kind and rate, since names differ from node to node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys/class")


def described(variables: Mapping[str, str], sys_class: Path = SYS) -> str:
    """Such as `8 x InfiniBand 400 Gb/sec (4X NDR)`; else Ethernet interfaces; empty: no adapter is known."""
    ports: list[str] = []
    if variables.get("NCCL_IB_DISABLE", "0") in ("", "0") and variables.get("NCCL_NET", "").lower() != "socket":
        ports = list(_infiniband(sys_class / "infiniband", variables.get("NCCL_IB_HCA", "")))
    ports = ports or list(_ethernet(sys_class / "net", variables.get("NCCL_SOCKET_IFNAME", "")))
    return ", ".join(f"{n} x {kind}" for kind, n in sorted(Counter(ports).items()))


def is_chosen(name: str, choice: str) -> bool:
    """Whether NCCL's list of prefixes (`mlx5`, `=eth0,eth1`, `^docker`, `=mlx5_0:1`) takes a device or `device:port`.

    An empty list takes all.
    """
    if not choice:
        return True
    takes = not choice.startswith("^")
    choice = choice.removeprefix("^")
    is_exact = choice.startswith("=")
    wanted = [one for one in choice.removeprefix("=").split(",") if one]
    device = name.split(":")[0]
    hit = any((one in (device, name)) if is_exact or ":" in one else device.startswith(one) for one in wanted)
    return hit == takes


def _infiniband(folder: Path, choice: str) -> Iterator[str]:
    for port in sorted(folder.glob("*/ports/*")):
        name = f"{port.parent.parent.name}:{port.name}"
        if _read(port / "state").endswith("ACTIVE") and is_chosen(name, choice):
            yield f"{_read(port / 'link_layer') or 'InfiniBand'} {_read(port / 'rate')}".strip()


def _ethernet(folder: Path, choice: str) -> Iterator[str]:
    for interface in sorted(folder.glob("*")):
        is_hardware = (interface / "device").exists()
        if is_hardware and _read(interface / "operstate") == "up" and is_chosen(interface.name, choice):
            speed = _read(interface / "speed")
            yield f"Ethernet {speed} Mb/s" if speed.isdecimal() else "Ethernet"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # the kernel refuses the speed of an interface that is down
        return ""
