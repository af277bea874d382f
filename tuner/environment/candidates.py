"""Changes of the environment that are worth trying: a curated list, and the reader of a user's own list.

No change affects a job's results, its peers, or the code that it loads. The order of sums may change, as between two
releases of NCCL. Names, defaults and releases are from the documentation and sources of NCCL, libfabric and the OFI
plugin.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Final

import msgspec

from ...agent.machine.tunable_variables import why_refused
from ...store.errors import UserError, printable, reason


class Candidate(msgspec.Struct, frozen=True):
    """One variable and a value to try, spelled `NCCL_BUFFSIZE=8388608`."""

    variable: str
    value: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


class Place(Enum):
    """Machines and jobs on which a variable has an effect."""

    anywhere = "any job"
    nodes = "jobs of several nodes"
    nvls = "NVLink switches that sum up (compute capability 9.0 and newer)"
    pcie = "GPUs without NVLink"
    verbs = "several nodes on InfiniBand or RoCE"
    infiniband = "several nodes on InfiniBand"
    roce = "several nodes on RoCE"
    sockets = "several nodes on TCP sockets"
    efa = "several nodes on AWS EFA"
    slingshot = "several nodes on Slingshot"


class Offer(msgspec.Struct, frozen=True):
    """A variable of the curated list."""

    variable: str
    values: tuple[str, ...]
    """Values in the order of trials, without the default."""
    effect: str
    """Its effect, in a sentence."""
    since: int
    """The first NCCL release with it, as NCCL encodes it (21801 for 2.18.1); 0: another library has it."""
    place: Place


OFFERS: Final = (
    Offer("NCCL_NET_GDR_LEVEL", ("SYS",), "Lets adapters reach GPU memory at any distance.", 2407, Place.verbs),
    Offer("FI_CXI_RDZV_PROTO", ("alt_read",), "Reads large messages by another protocol.", 0, Place.slingshot),
    Offer("NCCL_SOCKET_NTHREADS", ("4", "8"), "Has more CPU threads serve each connection.", 2408, Place.sockets),
    Offer("NCCL_CROSS_NIC", ("1", "0"), "Says whether a ring may use another adapter on each node.", 2506, Place.nodes),
    Offer("NCCL_IB_QPS_PER_CONNECTION", ("4", "2"), "Spreads a connection over queue pairs.", 21003, Place.verbs),
    Offer("FI_CXI_RDZV_THRESHOLD", ("0", "65536"), "Sets the size from which data are fetched.", 0, Place.slingshot),
    Offer("NCCL_NSOCKS_PERTHREAD", ("4", "2"), "Opens more sockets for each such thread.", 2408, Place.sockets),
    Offer("NCCL_NVLS_ENABLE", ("0",), "Does not let NVLink switches sum up.", 21701, Place.nvls),
    Offer("NCCL_P2P_LEVEL", ("SYS", "PIX"), "Sets how far GPUs reach each other's memory.", 2408, Place.pcie),
    Offer("NCCL_BUFFSIZE", ("8388608", "2097152"), "Sets a channel's buffer in bytes (4 MiB).", 2305, Place.anywhere),
    Offer("NCCL_NCHANNELS_PER_NET_PEER", ("4", "8"), "Uses more channels to each remote peer.", 21207, Place.nodes),
    Offer("NCCL_NETDEVS_POLICY", ("ALL",), "Lets each GPU use all adapters near it.", 22803, Place.nodes),
    Offer("OFI_NCCL_EAGER_MAX_SIZE", ("-1",), "Sends no message before the receiver is ready.", 0, Place.efa),
    Offer("OFI_NCCL_MIN_STRIPE_SIZE", ("524288",), "Sets the size that is split over adapters.", 0, Place.efa),
    Offer("FI_CXI_RX_MATCH_MODE", ("hybrid",), "Lets software match messages if hardware is full.", 0, Place.slingshot),
    Offer("NCCL_MAX_CTAS", ("16", "8"), "Leaves more of the GPU to computation.", 21701, Place.anywhere),
    Offer("NCCL_MIN_CTAS", ("32",), "Has more of the GPU move data.", 21701, Place.anywhere),
    Offer("NCCL_CTA_POLICY", ("1",), "Prefers settings that leave the GPU to computation.", 22703, Place.anywhere),
    Offer("NCCL_P2P_NET_CHUNKSIZE", ("524288",), "Sends larger chunks between nodes (128 KiB).", 21403, Place.nodes),
    Offer("NCCL_IB_ADAPTIVE_ROUTING", ("0",), "Keeps the adapters from adaptive routing.", 21602, Place.infiniband),
    Offer("NCCL_IB_ADAPTIVE_ROUTING", ("1",), "Has the adapters use adaptive routing.", 21602, Place.roce),
    Offer("NCCL_IB_SPLIT_DATA_ON_QPS", ("1",), "Splits each message over its queue pairs.", 21801, Place.verbs),
    Offer("NCCL_PXN_DISABLE", ("1",), "Sends from each GPU, never through its neighbour.", 21207, Place.nodes),
    Offer("NCCL_NTHREADS", ("256", "128"), "Sets the GPU threads of each block (512).", 2305, Place.anywhere),
    Offer("NCCL_SHM_DISABLE", ("1",), "Goes around shared memory between GPUs of a node.", 2305, Place.pcie),
)
"""In the order of trials: by recordings, variables of the network matter most."""

WHOLE: Final = re.compile(r"-?\d+|0x[\da-fA-F]+", re.ASCII)
SHAPE: Final = re.compile(r"([A-Za-z_]\w*)=([!-~]+)", re.ASCII)
MOST_BYTES: Final = 1 << 20
"""Longest file with a list of candidates."""


def candidates_for(
    hardware: Mapping[str, str | int | float | bool],
    nccl_version: int,
    is_multi_node: bool,
    set_by_user: Collection[str],
) -> list[Candidate]:
    """The curated changes for a machine in the order of trials: second values of variables come last.

    `hardware` is the description that belongs to a fabric_id. An `nccl_version` of 0 is no NCCL. Variables in
    `set_by_user` must not change.
    """
    places = set(_places(hardware, is_multi_node))
    offers = [
        [Candidate(one.variable, value) for value in one.values]
        for one in OFFERS
        if nccl_version > 0 and one.since <= nccl_version and one.place in places and one.variable not in set_by_user
    ]
    return [one for values in zip_longest(*offers) for one in values if one is not None]


def effect_of(candidate: Candidate) -> str:
    """The effect of a change, in a sentence; empty if it is not in the curated list."""
    return next(
        (one.effect for one in OFFERS if one.variable == candidate.variable and candidate.value in one.values), ""
    )


def takes_number(variable: str) -> bool:
    """Whether a variable of the curated list has whole numbers as its values."""
    values = [value for one in OFFERS if one.variable == variable for value in one.values]
    return bool(values) and all(WHOLE.fullmatch(value) for value in values)


def _places(hardware: Mapping[str, str | int | float | bool], is_multi_node: bool) -> Iterator[Place]:
    yield Place.anywhere
    known = {name: value for name, value in hardware.items() if isinstance(value, int | float)}
    if known.get("n_nvlinks", 0) > 0 or known.get("type_intra") == 1:  # the latter for an emulated machine
        if known.get("compute_capability", 0) >= 90:
            yield Place.nvls
    elif known.keys() & {"n_nvlinks", "type_intra"} and known.get("ranks_per_node", 2) > 1:
        yield Place.pcie
    if is_multi_node:
        yield Place.nodes
        yield from _networks(str(hardware.get("adapters", "")), str(hardware.get("NCCL_NET", "")).lower())


def _networks(adapters: str, forced: str) -> Iterator[Place]:
    """Kinds of networks, from Linux's description of the adapters in `agent/machine/adapters.py`; RDMA has Gb/sec."""
    if "Unknown" in adapters:  # Linux's link layer of EFA
        yield Place.efa
    elif "libfabric" in forced or "ofi" in forced:
        yield Place.slingshot
    elif "InfiniBand" in adapters:
        yield from (Place.verbs, Place.infiniband)
    elif "Gb/sec" in adapters:
        yield from (Place.verbs, Place.roce)
    elif adapters:
        yield Place.sockets


def read_candidates(path: Path) -> list[Candidate]:
    """A user's list: one `NAME=VALUE` in each line; `#` begins a comment.

    Raises:
        UserError: it cannot be read, or a line is no `NAME=VALUE`, or must not be tried.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the candidates in {path}: {reason(error)}", "name a text file") from error
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} is larger than {MOST_BYTES} bytes", "list a few candidates, one a line")
    found: dict[Candidate, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (stated := line.partition("#")[0].strip().removeprefix("export ")):
            continue
        where = f"{path}, line {number}"
        shape = SHAPE.fullmatch(stated)
        if shape is None:
            raise UserError(f"{where}: {printable(stated)} is no NAME=VALUE", "write such as NCCL_BUFFSIZE=8388608")
        candidate = Candidate(*shape.groups())
        if why := why_refused(candidate.variable):
            raise UserError(f"{where}: {candidate.variable} is not tried: {why}", "remove the line")
        if takes_number(candidate.variable) and not WHOLE.fullmatch(candidate.value):
            raise UserError(f"{where}: {candidate} is no whole number", f"{candidate.variable} takes only these")
        if candidate in found:
            raise UserError(f"{where}: {candidate} is there already, in line {found[candidate]}", "remove one of them")
        found[candidate] = number
    if not found:
        raise UserError(f"{path} lists no candidate", "write such as NCCL_BUFFSIZE=8388608, one a line")
    return [*found]
