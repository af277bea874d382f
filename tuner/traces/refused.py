"""Files of known kinds that hold nothing to import: each is refused with the reason.

The message says why, and what to do instead; "no known format" would not.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class Refusal(NamedTuple):
    """Why a file cannot be imported, and what its owner can do."""

    what: str
    remedy: str


_RULES: Final = Refusal(
    "is a table of tuner rules: choices, not measurements",
    "judge it with `zerotune replay TRACE --policy table --plan FILE`",
)
_ARCHIVE: Final = Refusal("is an archive", "unpack it and name a file of it, or the folder")
_NVIDIA_RULE: Final = re.compile(
    rb"(?m)^#?\s*collective_type\s*,\s*min_bytes|^[a-z]+,\d+,\d+,[a-z_]+,[a-z0-9]+,-?\d+,-?\d+,-?\d+"
)
_OTHER_PACKERS: Final = (b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh", b"7z\xbc\xaf\x27\x1c")
_RULE_HEADERS: Final = (b"coll,nnodes,nranks,upto_bytes,", b"colltype,bytesperrank,")
_SWEEP: Final = (b'"n_cells"', b'"n_places"', b'"n_visited"')
_NSIGHT: Final = Refusal(
    "is Nsight's summary of kernels or ranges: it does not say how many bytes were sent, nor among how many ranks",
    "log with `zerotune launch --log-trace`, PyTorch's Flight Recorder or its profiler",
)
_OTHERS: Final = {
    b"time(%),totaltime(ns),": _NSIGHT,
    b",rank,comp_comm_overlap_pctg": Refusal(
        "is HTA's table of overlap: shares of time, no collectives",
        "import the profiler's traces that it was made from",
    ),
    b"#osumpi": Refusal(
        "is an OSU benchmark of MPI, whose times are not NCCL's", "measure with nccl-tests, whose output is imported"
    ),
    b"#bytes#iterations": Refusal(
        "is perftest's table of one link: no collectives", "measure with nccl-tests, whose output is imported"
    ),
}
"""How the first line of a table begins, without spaces and in lower case."""
_DEEPSPEED: Final = (b"| comm op: ", b"Comm. Op ")


def refusal(begin: bytes) -> Refusal | None:
    """The reason not to import a file with this beginning; None if it is of no such kind."""
    if begin[257:262] == b"ustar" or begin.startswith(b"PK\x03\x04"):
        return _ARCHIVE
    if begin.lstrip().startswith(b"{") and b'"workload_graph"' in begin[:512]:
        return Refusal(
            "is a Chakra graph as JSON, which does not say how many bytes its collectives move",
            "import the protobuf trace that it was made from",
        )
    if begin.lstrip().startswith(b"{") and b'"zerotune_plan"' in begin[:512]:
        return Refusal("is a plan: choices, not measurements", _RULES.remedy)
    if begin.startswith(_OTHER_PACKERS):
        return Refusal("is packed in a way that is not read", "unpack it, or pack it with gzip")
    if begin.startswith(b"PAR1"):
        return Refusal("is Parquet", "import the CSV that `zerotune export --to measurements` writes")
    if begin.startswith(b"SQLite format 3\0"):
        remedy = "give a trace, or what `zerotune export FILE --to measurements` writes of a store"
        return Refusal("is a SQLite database, perhaps our store or one of Nsight's, and no trace", remedy)
    if begin.lstrip().startswith(b"{") and all(key in begin[:2048] for key in _SWEEP):
        return Refusal(
            "is what `zerotune sweep --json` prints: medians, whose samples are in the sweep's store already",
            "take them elsewhere with `zerotune export samples.csv --to measurements`",
        )
    first_line = begin.lstrip().split(b"\n", 1)[0].replace(b" ", b"").lower()
    other = next((why for mark, why in _OTHERS.items() if first_line.startswith(mark)), None)
    if other is not None:
        return other
    if first_line.startswith(_RULE_HEADERS) or _NVIDIA_RULE.search(begin[:4096]):
        return _RULES
    if b"collectivename," in first_line and b"inmsgnelems" in first_line and b"comm_latency" not in first_line:
        return Refusal(
            "is TraceLens's table of single ranks: the latency of whole collectives is missing, and a rank's duration"
            " includes waiting for the others",
            "import nccl_summary_implicit_sync.csv of the same report (its columns comm_latency_...), or the traces",
        )
    if first_line.startswith(b"gpu_cc,op,dtype,shape_elems,"):
        return Refusal(
            "is XLA's collective performance table: throughputs by XLA's own definition, no times and no settings",
            "measure with nccl-tests, whose output is imported",
        )
    if any(mark in begin for mark in _DEEPSPEED):
        return Refusal(
            "is a log of DeepSpeed's comms logger: sizes are rounded, the number of ranks is not told, and every call"
            " was synchronised for timing",
            "log with `zerotune launch --log-trace`, PyTorch's Flight Recorder or its profiler",
        )
    return None
