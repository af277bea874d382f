"""What is fuzzed in Python: functions of bytes that return or raise the refusal that is documented, and nothing else.

Each stands for a door through which bytes come in that others wrote. What must hold of what was accepted is asserted.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

from zerotune.agent.nccl import fabric, library
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.store import wire
from zerotune.store.errors import BookError, FabricError, PlanError, TraceError, UserError, WireError
from zerotune.store.plan_file import read_plan
from zerotune.store.records import CommunicatorClass
from zerotune.store.sqlite.rows.measurements import well_formed
from zerotune.store.trace_format import TRACE_SUFFIX
from zerotune.tuner.advice.models.huggingface import read_config
from zerotune.tuner.fingerprint.encoding.arrays import from_bytes as weights_from_bytes
from zerotune.tuner.fingerprint.encoding.features import FEATURES_VERSION
from zerotune.tuner.fleet.book import opened as open_book
from zerotune.tuner.fleet.objects import InvalidObject
from zerotune.tuner.fleet.objects import unpack as unpack_object
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.knowledge_pool import KnowledgePool
from zerotune.tuner.offline.jobs.summary import read_summary
from zerotune.tuner.offline.replay.plans import plan_rows
from zerotune.tuner.offline.tuner_tables_reading import read_ncclx, read_nvidia_csv
from zerotune.tuner.service.service import Reply, Service
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.formats import FORMATS
from zerotune.tuner.traces.measuring import UserFacts
from zerotune.tuner.traces.records import MAX_BYTES

POOL_NAME: Final = hashlib.sha256(b"fabric").hexdigest()[:32] + ".msgpack"
POOL_READERS: Final = (Path(__file__).parent / "corpus" / "agent_messages" / "seed-6").read_bytes()
"""What ranks say to the brain that starts from a pool."""
RECORDED_FABRIC: Final = (fabric.FABRICS_DIR / "rtx5090_loopback.toml").read_bytes()
MAX_MESSAGES: Final = 24
MAX_TICKS: Final = 200
FOLDER: Final = Path(tempfile.mkdtemp(prefix="zerotune-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


class Target(NamedTuple):
    """One door."""

    run: Callable[[bytes], None]
    max_bytes: int = 16384
    dictionary: Sequence[bytes] = ()
    """Words that its language has; a fuzzer puts them in."""


@contextlib.contextmanager
def given_file(name: str, content: bytes) -> Iterator[Path]:
    path = FOLDER / name
    path.write_bytes(content)
    yield path


# ---- messages ----


def framed(parts: Sequence[tuple[int, bytes, bytes | None]]) -> bytes:
    """The input of `agent_messages` for these messages: who sends each, its body and its records."""
    made = b""
    for sender, body, records in parts:
        made += struct.pack(
            "<BHH", sender | (HAS_RECORDS if records is not None else 0), len(body), len(records or b"")
        )
        made += body + (records or b"")
    return made


TIME_PASSES: Final = 0x80
"""Bit of the first byte: no message, but tenths of a second in the other bits."""
HAS_RECORDS: Final = 0x40
N_SENDERS: Final = 4


def messages_in(data: bytes) -> Iterator[tuple[int, list[bytes]]]:
    at = 0
    for _ in range(MAX_MESSAGES):
        if at >= len(data):
            return
        first = data[at]
        if first & TIME_PASSES:
            at += 1
            yield first, []
            continue
        n_body, n_records = struct.unpack_from("<HH", data[at + 1 : at + 5].ljust(4, b"\0"))
        body, records = data[at + 5 : at + 5 + n_body], data[at + 5 + n_body : at + 5 + n_body + n_records]
        at += 5 + n_body + n_records
        yield first, [wire.HEADER, body, *([records] if first & HAS_RECORDS else [])]


class KeptStore:
    """The store's part that a service needs; what comes in must be what SQLite takes."""

    def record_job(self, job_id, fabric_id, fabric, n_ranks, name=""):
        assert 0 < len(job_id) <= wire.MAX_ID_LENGTH

    def update_job(self, job_id, **news):
        pass

    def record_measurements(self, fabric_id, job_id, block):
        assert well_formed(block).all()

    def record_steps(self, job_id, steps):
        assert len(steps) <= wire.MAX_STEPS

    def record_decisions(self, decisions):
        pass


def agent_messages(data: bytes) -> None:
    """What ranks and other nodes' daemons send, to a whole service with a brain; its answers must be readable."""
    serve(data, Knowledge())


def serve(data: bytes, known: Knowledge) -> None:
    """These messages, to a service whose brains know so much."""
    now_s = 1e9

    def make_brain(job_id, fabric_id, facts, knowledge, options):
        return Brain(job_id, fabric_id, facts, knowledge, BrainSettings(), lambda: now_s)

    service = Service(KeptStore(), make_brain, lambda: now_s, wire.Welcome(1, "fuzz"))
    fabric_ids: set[str] = set()

    def answered(replies: Sequence[Reply]) -> None:
        for _, message in replies:
            wire.decode_daemon(wire.encode(message))

    for first, frames in messages_in(data):
        if first & TIME_PASSES:
            now_s += 0.1 * (first & 0x7F)
            for _ in range(MAX_TICKS):
                if service.next_tick_s > now_s:
                    break
                answered(service.tick())
            continue
        try:
            message, raw = wire.decode_agent(frames)
        except WireError:
            continue
        if isinstance(message, wire.StatusRequest):
            continue
        records = None
        if raw is not None:
            records, _ = wire.usable_records(message, raw)
        answered(service.handle(bytes([first % N_SENDERS]), message, records))
        if isinstance(message, wire.Hello) and message.fabric_id not in fabric_ids:
            fabric_ids.add(message.fabric_id)
            service.model_ready(message.fabric_id, known)
    status = wire.StatusReply(1, "fuzz", "", "", 0.0, 0, 0, jobs=service.jobs())
    assert len(wire.decode_daemon(wire.encode(status)).jobs) == len(service.jobs())
    service.close()
    for job in service.jobs():
        assert "Error" not in job.health, job.health


def daemon_messages(data: bytes) -> None:
    """What a daemon sends to an agent; a plan goes into the plugin as it would, and comes back row by row."""
    try:
        message = wire.decode_daemon([wire.HEADER, data])
    except WireError:
        return
    if not isinstance(message, wire.PlanOffer):
        return
    plugin = library.load()
    for plan in (message.plan, message.plan.at_last()):
        with contextlib.suppress(PlanError):
            plugin.load_plan(plan)
            assert plugin.flip(plan.epoch)
            assert plugin.active_epoch() == plan.epoch


# ---- files ----


def importing(format_name: str | None) -> Callable[[bytes], None]:
    """What `zerotune store import` reads, in one format or found out."""
    name = f"trace_rank_1{TRACE_SUFFIX if format_name == 'zerotune' else ''}"

    def run(data: bytes) -> None:
        content = own_members(data) if format_name == "zerotune" else data
        with given_file(name, content) as path:
            for facts in (UserFacts(is_default=True, n_nodes=1), UserFacts()):
                try:
                    trace = read_trace(path, format_name)
                    for portion in trace.portions(facts):
                        assert well_formed(portion.rows).all()
                        assert (portion.rows["message_bytes"] <= MAX_BYTES).all()
                except (TraceError, UserError):
                    continue

    return run


def own_members(data: bytes) -> bytes:
    """Our trace of these bytes: each member's length, then what it holds; packed here, since a checksum guards it."""
    from zlib import compress

    made, at = b"", 0
    while at + 2 <= len(data):
        (n_bytes,) = struct.unpack_from("<H", data, at)
        made += compress(data[at + 2 : at + 2 + n_bytes], 1, 31)
        at += 2 + n_bytes
    return made


def packed_file(data: bytes) -> None:
    """Any bytes behind gzip's first two, read as each kind of reader does."""
    with given_file("log.gz", b"\x1f\x8b" + data) as path:
        for format_name in ("inspector", "kineto", "chakra", "zerotune"):
            with contextlib.suppress(TraceError):
                list(read_trace(path, format_name).blocks())


def plan_file(data: bytes) -> None:
    with given_file("plan.json", data) as path, contextlib.suppress(PlanError):
        library.load().load_plan(read_plan(path).plan)


def tuner_rules(data: bytes) -> None:
    """Tables of choices: NVIDIA's tuner configuration, NCCLX's, scitix's table."""
    with given_file("rules.csv", data) as path:
        with contextlib.suppress(PlanError):
            read_nvidia_csv(path)
        with contextlib.suppress(PlanError):
            read_ncclx(path)
        with contextlib.suppress(PlanError):
            plan_rows(path)
    with given_file("rules.json", data) as path, contextlib.suppress(PlanError):
        read_ncclx(path)


def fabric_file(data: bytes) -> None:
    """A fabric, and prices of everything that it then offers."""
    with given_file("machine.toml", data) as path:
        try:
            os.utime(path, ns=(0, next(_STAMPS)))  # fabrics are kept by path and time
            found = fabric.load(path)
            places = [
                CommunicatorClass(1, 1),
                found.communicator(range(found.max_ranks if found.max_ranks < 4096 else 1)),
            ]
            for place in places:
                found.max_channels(place)
            wire.encode(wire.Hello("j", 0, 1, 0, "", 1, found.fabric_id, found.describe(), 0, 5))
        except FabricError:
            return


def fabric_points(data: bytes) -> None:
    """The CSV of measured points beside a fabric."""
    with given_file("points.csv", data):
        fabric_file(re.sub(rb"(?m)^recorded = .*", b'recorded = "points.csv"', RECORDED_FABRIC))


def model_config(data: bytes) -> None:
    """A Hugging Face configuration, which `zerotune advise` reads."""
    with given_file("config.json", data) as path, contextlib.suppress(UserError):
        assert read_config(path).n_parameters > 0


def run_summary(data: bytes) -> None:
    with given_file("summary.json", data) as path, contextlib.suppress(UserError):
        read_summary(path)


def pool_file(data: bytes) -> None:
    """What another user of the node shares, and a job whose brain starts from it."""
    folder = FOLDER / "pool" / str(os.getuid())
    folder.mkdir(parents=True, exist_ok=True)
    others = os.getuid() + 1
    with given_file(f"pool/{os.getuid()}/{POOL_NAME}", data), patch("os.getuid", return_value=others):
        statistics, by_job = KnowledgePool(FOLDER / "pool").with_others("fabric", [], [])
    if statistics or by_job:
        serve(POOL_READERS, Knowledge(statistics, by_job=by_job))


def kept_model(data: bytes) -> None:
    """A model of a store."""
    with contextlib.suppress(ValueError):
        Baked.from_bytes(data)


def stage_weights(data: bytes) -> None:
    """Weights of an encoder, of a store or a file."""
    with contextlib.suppress(ValueError):
        weights_from_bytes(data, FEATURES_VERSION)


def fleet_object(data: bytes) -> None:
    """Measurements below the fleet's URL; whoever writes them names them by their hash."""
    place = f"v1/fabric=fabric/day=2026-01-01/{hashlib.sha256(data).hexdigest()}.parquet"
    with contextlib.suppress(InvalidObject):
        found = unpack_object(place, data)
        assert found.rows.num_rows > 0
        assert found.fabric.fabric_id == "fabric"


def book(data: bytes) -> None:
    """A book of the fleet that nobody has signed."""
    with contextlib.suppress(BookError):
        found = open_book(data, "book")
        for cell in found.winners():
            assert cell.key.size_class >= 0
            assert cell.bytes_range[0] > 0


def _stamps() -> Iterator[int]:
    stamp = 0
    while True:
        stamp += 1
        yield stamp


_STAMPS: Final = _stamps()


def topology_file(data: bytes) -> None:
    with given_file("topology.xml", data) as path, contextlib.suppress(UserError):
        read_machine(path)


_NUMBERS: Final = (b"-1", b"0", b"1e999", b"NaN", b"9" * 5000, b"9223372036854775808", b"-" + b"9" * 25, b"1.5", b"inf")
_JSON: Final = (*_NUMBERS, b"null", b"true", b"{}", b"[]", b'""', b"[[", b'{"', b'":', b'"\\ud800"', b"[" * 2000)
_MSGPACK: Final = (
    b"\xc0", b"\xc2", b"\xc3", b"\x80", b"\x90", b"\xff", b"\x00", b"\xce" + b"\xff" * 4, b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\xcb\x7f\xf0" + bytes(6), b"\xdd" + b"\xff" * 4,
    b"\xdb" + b"\xff" * 4,
)  # fmt: skip
_CSV: Final = (*_NUMBERS, b",", b"\n", b'"', b"#", b"default", b"ring", b"pat", b"simple", b"allgather", b"allreduce")
_XML: Final = (
    *_NUMBERS,
    b"<gpu",
    b"<pci",
    b"<net",
    b"/>",
    b'busid="0000:0f:00.0"',
    b"sm=",
    b"count=",
    b"speed=",
    b"guid=",
)
_LANGUAGES: Final = {
    "tuner_csv": _CSV,
    "measurements_csv": _CSV,
    "summary_csv": _CSV,
    "zerotune": _MSGPACK,
    "chakra": (),
}

TARGETS: Final = {
    "agent_messages": Target(agent_messages, 8192, _MSGPACK),
    "daemon_messages": Target(daemon_messages, 4096, _MSGPACK),
    "plan_file": Target(plan_file, 8192, _JSON),
    "tuner_rules": Target(tuner_rules, 4096, (*_CSV, b"coll,nnodes,nranks,upto_bytes,algo,proto\n")),
    "fabric_file": Target(
        fabric_file, 16384, (*_NUMBERS, b"[", b"]]", b"=", b"\n", b'""', b"{}", b"[]", b"1979-05-27")
    ),
    "fabric_points": Target(fabric_points, 4096, _CSV),
    "topology_file": Target(topology_file, 8192, _XML),
    "model_config": Target(model_config, 4096, _JSON),
    "run_summary": Target(run_summary, 4096, _JSON),
    "pool_file": Target(pool_file, 4096, _MSGPACK),
    "kept_model": Target(kept_model, 16384, (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY\x01\x00", b"|O")),
    "stage_weights": Target(stage_weights, 8192, _MSGPACK),
    "book": Target(book, 8192, _JSON),
    "fleet_object": Target(fleet_object, 16384, (b"PAR1", b"zerotune.fleet", b"zerotune.fabric", *_JSON)),
    "packed_file": Target(packed_file, 4096, (b"\x1f\x8b\x08\0\0\0\0\0\0\xff",)),
    "import_any": Target(importing(None), 8192, (*_JSON, b"traceEvents", b"pg_config", b'"schema"', b"busbw")),
    **{f"import_{one.name}": Target(importing(one.name), 8192, _LANGUAGES.get(one.name, _JSON)) for one in FORMATS},
}
