"""Asks NCCL's own library for its choices on a described cluster."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ....store.errors import PluginError, UserError
from ....store.foreign.own_python import python_with
from ....store.records import PlanRow
from .. import fabric
from ..mock_cuda.machine import read_machine
from ..other_plugins import PROFILER, TUNER
from .completing import completed
from .machines import MACHINES
from .protocol import USER_ERROR, NodeAnswer, NodeRequest, Question

MAX_RANKS: Final = 256
"""Limit of ranks on one machine: each needs a thread and NCCL's own threads."""
TIMEOUT_S: Final = 300.0
"""Limit of NCCL's time: several times that of the largest cluster on two cores."""
_POLL_S: Final = 0.2
_READ_BYTES: Final = 1 << 16
_STDERR_BYTES: Final = 2000
_SET_BY_TWIN: Final = frozenset(
    {"NCCL_TOPO_FILE", "NCCL_HOSTID", "NCCL_NET_PLUGIN"}
    | {name for place in (TUNER, PROFILER) for name in (place.variable, place.next_variable)}
)
"""Variables that the twin must not inherit: they would change NCCL's own choice."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes."""

    topology: Path
    n_nodes: int
    ranks_per_node: int

    @property
    def n_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.n_nodes * self.ranks_per_node


@contextlib.contextmanager
def topology_file(name_or_path: str, capability: int | None = None, nic_gbps: float | None = None) -> Iterator[Path]:
    """The topology file of a name in MACHINES, a path, or a fabric's name; it exists while the context lasts.

    The other arguments are those of `completed`.

    Raises:
        UserError: it is none of them, the fabric names no machine, or the file contradicts the arguments.
    """
    given = Path(name_or_path)
    is_file = name_or_path not in MACHINES and given.is_file()
    text = None if is_file else _topology(name_or_path)
    with tempfile.TemporaryDirectory(prefix="zerotune-") as folder:
        path = Path(folder) / (given.name if is_file else f"{name_or_path}.xml")
        try:
            if text is not None:
                path.write_text(text, encoding="utf-8")
            text = completed(given if is_file else path, capability, nic_gbps) or text
            if text is None:
                path = given
            else:
                path.write_text(text, encoding="utf-8")
                read_machine(path)
        except UserError as error:
            raise UserError(error.problem.replace(str(path), name_or_path), error.remedy) from None
        yield path


def _topology(name: str) -> str:
    if name in MACHINES:
        return MACHINES[name].topology()
    if name not in (*fabric.names(), *fabric.user_names()):
        known = ", ".join((*MACHINES, *fabric.user_names()))
        raise UserError(f"{name!r} is not a topology file, a machine or a fabric", f"machines: {known}")
    if (node := fabric.load(name).node) is None:
        raise UserError(f"fabric {name} names no machine", "name another")
    return node.topology


def ask_nccl(
    library: Path,
    cluster: Cluster,
    questions: Sequence[Question],
    rows: Sequence[PlanRow] = (),
    *,
    observe: bool = False,
    search: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> NodeAnswer:
    """Make the cluster's communicator with the real library, a libnccl.so.2, and make the calls in `questions`.

    For `rows`, `observe` and `search`, see `NodeRequest`. The answer is that of rank 0's node, all of whose ranks must
    choose alike.

    Raises:
        UserError: the ranks do not fit the topology, or library or topology cannot be used.
        PluginError: it took too long.
    """
    n_gpus = len(read_machine(cluster.topology).gpus)
    if not 1 <= cluster.ranks_per_node <= n_gpus:
        raise UserError(
            f"{cluster.ranks_per_node} ranks per node do not fit {cluster.topology.name}, which has {n_gpus} GPUs",
            f"ask for 1 to {n_gpus}",
        )
    if not 2 <= cluster.n_ranks <= MAX_RANKS:
        raise UserError(f"{cluster.n_ranks} ranks cannot be asked about", f"ask for 2 to {MAX_RANKS}")
    requests = [
        NodeRequest(
            library=str(library.absolute()),
            topology=str(cluster.topology.absolute()),
            n_nodes=cluster.n_nodes,
            ranks_per_node=cluster.ranks_per_node,
            node=node,
            questions=tuple(questions),
            rows=tuple(rows),
            observe=observe,
            search=search,
        )
        for node in range(cluster.n_nodes)
    ]
    with _Nodes(requests, time.monotonic() + timeout_s) as nodes:
        return nodes.answer()


class _Nodes:
    """A process per node."""

    def __init__(self, requests: Sequence[NodeRequest], deadline_s: float) -> None:
        self._requests = requests
        self._deadline_s = deadline_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stderr: list[int] = []
        self._unread: dict[int, bytes] = {}

    def __enter__(self) -> _Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        for stderr in self._stderr:
            os.close(stderr)

    def answer(self) -> NodeAnswer:
        first = self._start(self._requests[0])
        unique_id = self._line(first)
        others = [self._start(msgspec.structs.replace(each, unique_id=unique_id)) for each in self._requests[1:]]
        answer = msgspec.json.decode(self._line(first), type=NodeAnswer)
        for process in others:
            self._line(process)
        return answer

    def _start(self, request: NodeRequest) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_TWIN}
        stderr = os.memfd_create(f"node-{request.node}")
        self._stderr.append(stderr)
        process = subprocess.Popen(
            python_with("zerotune.agent.nccl.twin.worker"),
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_line` reports that it has ended
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
        return process

    def _line(self, process: subprocess.Popen[bytes]) -> str:
        """The next line that a process prints; fails as soon as any process has failed.

        Raises:
            UserError: a process has ended with an error.
            PluginError: time is up.
        """
        assert process.stdout is not None
        unread = self._unread.get(process.pid, b"")
        while b"\n" not in unread:
            while not select.select([process.stdout], [], [], _POLL_S)[0]:
                for place, other in enumerate(self._processes):
                    if other.poll() not in (None, 0):
                        raise self._failure(place)
                if time.monotonic() > self._deadline_s:
                    raise PluginError("NCCL did not answer in time: a process per node was at work")
            # Not readline: it may buffer further lines, which select would not see.
            received = os.read(process.stdout.fileno(), _READ_BYTES)
            if not received:
                process.wait()
                raise self._failure(self._processes.index(process))
            unread += received
        line, _, self._unread[process.pid] = unread.partition(b"\n")
        return line.decode().strip()

    def _failure(self, place: int) -> UserError:
        process, stderr = self._processes[place], self._stderr[place]
        n_bytes = os.fstat(stderr).st_size
        printed = os.pread(stderr, _STDERR_BYTES, max(0, n_bytes - _STDERR_BYTES)).decode(errors="replace").strip()
        last = printed.splitlines()[-1] if printed else f"it ended with code {process.returncode}"
        if process.returncode == USER_ERROR:
            return UserError(last)
        remedy = "give a topology that NCCL_TOPO_DUMP_FILE wrote, and a whole library; NCCL_DEBUG=WARN shows more"
        return UserError(f"NCCL cannot be asked (node {place}): {last}", remedy)
