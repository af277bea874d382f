"""Writes corpus/: what each target's fuzzing starts from, a few KiB each, made from tests/data and from what we write.

`python tests/fuzz/make_corpus.py` in the checkout. Inputs that once crashed are in it as files `fixed-*`,
which this leaves alone.
"""

from __future__ import annotations

import gzip
import json
import runpy
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import fuzz_targets
import msgspec
import numpy as np

from benchmarks.lib.fleet.fleet_rows import signer_of
from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.twin.machines import MACHINES
from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store import plan_file, wire
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    NextStage,
    Phase,
    Plan,
    PlanRow,
    Protocol,
    StepRecord,
    size_class,
)
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.fingerprint.encoding.arrays import to_bytes
from zerotune.tuner.fingerprint.encoding.features import FEATURES_VERSION
from zerotune.tuner.fleet.book import Cell, Contributor, FabricLine, Head, Skipped, sealed
from zerotune.tuner.fleet.objects import Fabric, pack
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.knowledge_pool import Shared

HERE: Final = Path(__file__).parent
CORPUS: Final = HERE / "corpus"
samples = SimpleNamespace(**runpy.run_path(str(HERE.parent / "traces" / "trace_samples.py")))
PLACE: Final = CommunicatorClass(4, 1)
ROWS: Final = (
    PlanRow(
        PLACE, Collective.all_gather, Phase.forward_gather, 1, 1 << 20, Candidate(Algorithm.ring, Protocol.ll128, 8)
    ),
    PlanRow(PLACE, Collective.all_gather, Phase.forward_gather, (1 << 20) + 1, 1 << 30, BASELINE, "kept"),
    PlanRow(
        CommunicatorClass(16, 2), Collective.all_reduce, Phase.other, 0, 4096, Candidate(Algorithm.tree, Protocol.ll, 2)
    ),
)
MEASUREMENTS_CSV: Final = (
    "job_id,fabric_id,measured_at_s,source,phase,collective,n_ranks,n_nodes,message_bytes,algorithm,protocol,n_channels,"
    "is_default,outcome,duration_us,timing_source,epoch,memory_pressure\n"
    "run,boxes,1790000000.5,live,forward_gather,all_gather,16,2,1048576,ring,ll128,8,0,ok,100.5,gpu_kernel,3,0.5\n"
    "run,boxes,1790000001.5,sweep,other,all_reduce,8,1,4096,,,0,1,ok,20,reported,0,\n"
    'other,"=boxes",1790000002.5,live,other,all_gather,8,1,4096,ring,ll,4,0,failed,0,reported,0,\n'
)


def observations(n: int, **fields: Any) -> np.ndarray[Any, Any]:
    records = np.zeros(n, wire.OBSERVATION_FIELDS)
    ordinary = {
        "comm_id": 7, "message_bytes": 4096, "start_ns": 1000 * np.arange(n), "duration_us": 50.0, "n_ranks": 2,
        "sequence": np.arange(n), "n_nodes": 1, "collective": 2, "algorithm": 1, "protocol": 2, "n_channels": 8,
        "phase": 1, "datatype": 7, "timing_source": 1, "flags": wire.FLAG_TIMED, "memory_pressure": 0.5, "step": 3,
    }  # fmt: skip
    for name, value in (ordinary | fields).items():
        records[name] = value
    return records


def costs() -> np.ndarray[Any, Any]:
    records = np.zeros(2, wire.COST_FIELDS)
    records["comm_id"], records["message_bytes"], records["n_ranks"], records["n_nodes"] = 7, (4096, 1 << 20), 2, 1
    records["collective"], records["n_algorithms"], records["n_protocols"], records["n_pipe_ops"] = 2, 7, 3, 1
    records["cost_us"], records["cost_us"][:, 1] = -1.0, (50.0, 40.0, 60.0)
    return records


def hello(rank: int, n_ranks: int = 2, **fields: Any) -> wire.Hello:
    facts = {**fabric.load("few_sms_node").describe(), "device_mb": 500}
    return wire.Hello("job", rank, n_ranks, rank, "node", 1, "fabric", facts, 22809, 5, **fields)


def of_agents(*parts: Any) -> bytes:
    """Messages as `agent_messages` reads them: (sender, message, records or None), or seconds that pass."""
    made = b""
    for part in parts:
        if isinstance(part, float):
            made += bytes([fuzz_targets.TIME_PASSES | min(127, int(10 * part))])
        else:
            sender, message, records = part
            frames = wire.encode(message, None if records is None else records.tobytes())
            made += fuzz_targets.framed([(sender, frames[1], None if records is None else frames[2])])
    return made


def agent_messages() -> Iterator[bytes]:
    greeted = (0, hello(0), None), (1, hello(1, name="called", epoch=3), None)
    seen = [(rank, wire.Observations("job", rank, 8, 1), observations(8, duration_us=50.0 + rank)) for rank in (0, 1)]
    steps = wire.Steps("job", 0, tuple(StepRecord(step, 0, 1000.0, 10.0, 0.5) for step in range(5)))
    yield of_agents(*greeted, 0.5, *seen, 1.0, 3.0)
    yield of_agents((0, hello(0, 1), None), (0, wire.CostTables("job", 0, 2), costs()), (0, steps, None), 1.0)
    yield of_agents(
        *greeted, (0, wire.Adopted("job", 1, 4), None), (0, steps, None), 2.0, (0, wire.Goodbye("job", 0), None)
    )
    node = wire.Forwarded("job", 1, 1, 4)
    yield of_agents(
        (0, hello(0), None), (2, node, observations(4)), 1.0, (2, wire.Forwarded("job", 1, 0, 0), observations(0))
    )
    yield of_agents((1, hello(1, leader="tcp://10.0.0.1:5577"), None), 1.0, seen[1], 12.0)
    yield of_agents((3, wire.Bell("other", 2), None), (3, wire.StatusRequest(), None), 12.7, 12.7)
    again = observations(8, sequence=np.arange(8, 16), collective=3, phase=3, message_bytes=1 << 20)
    yield of_agents(
        *greeted,
        *seen,
        1.0,
        *((rank, wire.Observations("job", rank, 8), again) for rank in (0, 1)),
        1.0,
        (0, steps, None),
        1.0,
    )


def daemon_messages() -> Iterator[bytes]:
    look = NextStage(2, 10, ROWS[:1])
    for message in (
        wire.Welcome(1, "0.1", "tcp://[::]:5577"),
        wire.PlanOffer("job", Plan(3, ROWS)),
        wire.PlanOffer("job", Plan(2**31 - 1, ROWS[:1], True, (look,))),
        wire.Observe("job", 20),
        wire.Bell("job", 3),
        wire.ErrorReply("BadHello", "no"),
        wire.StatusReply(
            1, "0.1", "", "", 1.0, 1, 0, (wire.JobStatus("job", "f", 0, 2, 2, 1, 5, 6, 0, 1, 2.0, 3.0, 0.1),)
        ),
    ):
        yield wire.encode(message)[1]


def plan_files() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        for plan in (Plan(1, ROWS), Plan(1, (), gathers_after_step=True)):
            plan_file.write_plan(path, plan_file.PlanFile(plan, "fabric", "job", "boxes"))
            yield path.read_bytes()


def tuner_rules() -> Iterator[bytes]:
    yield b"# by hand\nallgather,1,1048576,ring,ll128,8,2,16,-1,-1\nallreduce,1048577,4294967296,tree,simple,-1,2,16\n"
    yield b"reducescatter,0,65536,pat,simple,4,2,2,1,0\n"
    scitix = b"coll,nnodes,nranks,upto_bytes,algo,proto\n"
    yield scitix + b"allgather,2,16,65536,ring,ll\nallgather,2,16,1048576,undef,undef\n"


def fabric_files() -> Iterator[bytes]:
    for name in ("as_believed", "ethernet_boxes"):
        yield (fabric.FABRICS_DIR / f"{name}.toml").read_bytes()


def topology_files() -> Iterator[bytes]:
    for name in ("ethernet_box", "pcie_l40s"):
        yield MACHINES[name].topology().encode()


def packed_files() -> Iterator[bytes]:
    for text in (samples.INSPECTOR.encode()[:1500], b'{"traceEvents": []}', bytes(5000)):
        yield gzip.compress(text, mtime=0)[2:]
    yield (gzip.compress(b"a\n", mtime=0) + gzip.compress(b"", mtime=0) + b"\0\0" + gzip.compress(b"b", mtime=0))[2:]


def own_traces() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        log = TraceLog(
            Path(folder), job_id="job", rank=0, n_ranks=2, fabric_id="f", fabric={"emulated": "x"}, version="0"
        )
        log.record(observations(3))
        log.flush()
        log.steps([StepRecord(1, 0, 10.0, None, 0.5)])
        log.close()
        assert log.path is not None
        content = gzip.decompress(log.path.read_bytes())
    bodies = []
    decoder = msgspec.msgpack.Decoder()
    while content:  # several values side by side: each prefix that is one value is a member
        end = next(end for end in range(1, len(content) + 1) if _is_value(decoder, content[:end]))
        bodies.append(content[:end])
        content = content[end:]
    header = msgspec.msgpack.decode(bodies[0])
    bodies[0] = msgspec.msgpack.encode({**header, "started_at_s": 1.0})
    yield b"".join(struct.pack("<H", len(body)) + body for body in bodies)
    yield struct.pack("<H", len(bodies[0])) + bodies[0]


def _is_value(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> bool:
    try:
        decoder.decode(data)
    except msgspec.DecodeError:
        return False
    return True


def traces(format_name: str) -> Iterator[bytes]:
    if format_name == "zerotune":
        yield from own_traces()
    if format_name == "measurements_csv":
        yield MEASUREMENTS_CSV.encode()
    for name, (_, content) in samples.WRITTEN.items():
        if name.removesuffix("_old") == format_name:
            yield content
    for name, path in samples.REAL.items():
        if name.removesuffix("_old").removesuffix("_torn") == format_name:
            content = path.read_bytes()
            yield small(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)


def small(content: bytes) -> bytes:
    """A piece of a real trace that still has collectives: a few lines, or a document with a short array."""
    lines = content.splitlines(keepends=True)
    if b'"ncclProfileColl"' in content:
        first = next(line for line in lines if b'"ncclProfileColl"' in line)
        address = json.loads(first)["eventAddr"].encode()
        channels = [line for line in lines if address in line and b"KernelCh" in line]
        stops = [json.loads(line)["eventAddr"].encode() for line in channels[:2]]
        return b"".join([*lines[:4], first, *(line for line in lines if any(stop in line for stop in stops))][:14])
    if not content.startswith(b"{") or b"\n{" in content[:20000]:
        return content[:4000].rpartition(b"\n")[0] + b"\n" if len(content) > 4000 else content
    document = json.loads(content)
    key = next(key for key in ("traceEvents", "nodes", "entries") if key in document)
    for n_kept in (8, 4, 2, 1):
        made = json.dumps({**document, key: collectives(document[key], n_kept)}).encode()
        if len(made) < 6000:
            break
    return made


def collectives(elements: list[Any], n_kept: int) -> list[Any]:
    """The first kernels of NCCL with what launched them, or the first calls of it."""
    kernels = [one for one in elements if "ncclKernel_AllReduce" in one.get("name", "")][:n_kept]
    wanted = {one["args"].get("correlation") for one in kernels}
    launches = [
        one for one in elements if one.get("name") == "cudaLaunchKernel" and one["args"]["correlation"] in wanted
    ]
    begins = {(launch["tid"], one["ts"]) for launch in launches for one in elements if _encloses(one, launch)}
    around = [one for one in elements if (one.get("tid"), one.get("ts")) in begins]
    words = ("record_param_comms", "process_group:init", "Collective name", "nccl:")
    calls = [one for one in elements if any(word in json.dumps(one) for word in words)]
    return [*around, *launches, *kernels] or calls[:n_kept] or elements[:n_kept]


def _encloses(one: Mapping[str, Any], launch: Mapping[str, Any]) -> bool:
    of_thread = one.get("tid") == launch["tid"] and one.get("name", "").startswith("nccl:")
    return of_thread and one["ts"] <= launch["ts"] <= one["ts"] + one.get("dur", 0)


def model_configs() -> Iterator[bytes]:
    usual = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 256,
    }  # fmt: skip
    for more in (
        {"tie_word_embeddings": True},
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        {"model_type": "vit", "image_size": 224, "patch_size": 16, "id2label": {"0": "cat"}},
        {"model_type": "t5", "d_model": 64, "num_heads": 4, "num_layers": 2, "d_ff": 128, "d_kv": 16},
        {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    ):
        yield json.dumps(usual | more).encode()


def run_summaries() -> Iterator[bytes]:
    steps = [{"step": 1, "duration_us": 10.5, "exposed_us": 1.0, "loss_hex": "0x1p+0", "epoch": 1}]
    yield json.dumps({"steps": steps, "label": "a", "emulated": True, "fabric": "boxes", "n_ranks": 2}).encode()


def pool_files() -> Iterator[bytes]:
    place = CommunicatorClass(2, 1)
    lines = [
        CandidateStatistics(
            DecisionKey(place, Collective.all_gather, Phase.forward_gather, size_class(4096)),
            candidate, candidate.is_baseline, 20, 50.0 - at, 51.0 - at, 2.0, 48.0 - at, 0.0,
        )
        for at, candidate in enumerate((BASELINE, Candidate(Algorithm.ring, Protocol.ll, 2)))
    ]  # fmt: skip
    for by_job in ([], [lines]):
        yield msgspec.msgpack.encode(Shared(1, "fabric", lines, by_job))


def kept_models() -> Iterator[bytes]:
    grid, cells = np.full((1, 1, 2, 2, 3), 0.1, np.float32), np.array([[1, 0], [1, 2]])
    yield Baked(np.array([[2, 1]]), np.array([2]), cells, np.array([4, 64]), 40, grid, grid).to_bytes()


def stage_weights() -> Iterator[bytes]:
    yield to_bytes("lstm", FEATURES_VERSION, {"a": np.zeros((2, 3)), "b": np.ones(4)})


def books() -> Iterator[bytes]:
    cell = Cell(
        fabric_id="fabric", nccl_version=22809, tuner_abi=5, n_ranks=16, n_nodes=2, collective="all_gather",
        phase="other", size_class=80, algorithm="ring", protocol="ll", n_channels=8, is_default=False, median_us=10.0,
        spread=0.1, between_jobs=0.1, n_calls=100, n_jobs=4, n_contributors=2, gain=0.1, gain_std=0.01, is_winner=True,
    )  # fmt: skip
    of_fabric = (FabricLine("fabric", {"gpu": "H100"}), Contributor(fabric_id="fabric", name="node"))
    yield sealed((Head("url", 1, "zerotune 0", 1, 100, 4), *of_fabric, Skipped("x", "damaged"), cell), None)


def fleet_objects() -> Iterator[bytes]:
    block = np.zeros(4, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["collective"], block["algorithm"], block["n_channels"] = 16, 2, 2, 1, 8
    block["message_bytes"], block["duration_us"], block["step"], block["timing_source"] = 1 << 20, 100.0, range(4), 1
    facts, signer = {"nccl_version": 22809, "gpu": "H100"}, signer_of("node")
    yield pack("node", Fabric("fabric", facts), ["job"], np.zeros(4, np.int64), block, 1_767_225_600, signer).data


def plugin_programs() -> Iterator[bytes]:
    """Programs of target.c: a communicator's life under each pair of interfaces."""
    ring_row = struct.pack("<QQIIBBBBB3x", 1024, 1 << 20, 16, 2, 2, 0, 1, 2, 8)
    for tuner, profiler in ((0, 0), (1, 1), (2, 2), (3, 3), (3, 4), (4, 5), (5, 6)):
        begin = bytes([6, 3, 1, 6, 4, 1]) + bytes([0, 0, tuner, 7, 16, 2]) + bytes([1, 0, profiler, 7, 16, 2, 1])
        load = bytes([5, 1, 3, 0]) + ring_row + bytes([1])
        ask = bytes([2, 0, 2, 1, 230, 11, 1, 0xFF]) + bytes([3, 0, 4, 1, 230, 20, 0, 7, 3, 0xFF])
        coll = bytes([7, 0, 0, 1, 0]) + bytes([1, 128, 0, 14, 2, 7, 13, 0])
        channel = bytes([8, 0, 2, 1, 0, 0, 100]) + bytes([12, 1, 200, 1]) + bytes([10, 1])
        send = bytes([9, 0, 3, 1, 0, 5, 14, 100])
        yield begin + load + ask + coll + channel + bytes([10, 0]) + send + bytes([13, 14, 15, 0, 0, 15, 1, 0])


def seeds() -> dict[str, list[bytes]]:
    found = {
        "agent_messages": list(agent_messages()),
        "daemon_messages": list(daemon_messages()),
        "plan_file": list(plan_files()),
        "tuner_rules": list(tuner_rules()),
        "fabric_file": list(fabric_files()),
        "fabric_points": [
            (fabric.FABRICS_DIR / "rtx5090_loopback.csv").read_bytes()[:1200].rpartition(b"\n")[0] + b"\n"
        ],
        "topology_file": list(topology_files()),
        "packed_file": list(packed_files()),
        "model_config": list(model_configs()),
        "run_summary": list(run_summaries()),
        "pool_file": list(pool_files()),
        "kept_model": list(kept_models()),
        "stage_weights": list(stage_weights()),
        "book": list(books()),
        "fleet_object": list(fleet_objects()),
        "plugin": list(plugin_programs()),
    }
    formats = [name.removeprefix("import_") for name in fuzz_targets.TARGETS if name.startswith("import_")]
    found |= {f"import_{name}": list(traces(name)) for name in formats if name != "any"}
    found["import_any"] = [made[0][:1500] for name, made in found.items() if name.startswith("import_") and made]
    return found


def main() -> None:
    for name, contents in seeds().items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("seed-*"):
            old.unlink()
        for number, content in enumerate(contents):
            (folder / f"seed-{number}").write_bytes(content)
    for folder in CORPUS.iterdir():
        if folder.name not in {*fuzz_targets.TARGETS, "plugin"}:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
