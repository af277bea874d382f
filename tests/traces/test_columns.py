"""Reading by columns gives what reading line by line gives, or declines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.columns import Fields, Integers
from zerotune.tuner.traces.nccl import nccl_debug_lines, tuner_csv
from zerotune.tuner.traces.nccl.nccl_debug_lines import Lines

OWNERS = ["n:1:2 [0]", "n:1:2 [3]", "node-7.cluster:4711:4799 [7]"]
PREFIXES = ["", "[2026-01-02 03:04:05] ", "3: ", "[default0]:", "[1,2]<stdout>:", "worker-0 | "]
CALLS = [
    "{o} NCCL INFO {n}: opCount {i:x} sendbuff 0x7f{i:06x} recvbuff (nil) count {c} datatype 9 op 0 root 0 "
    "comm 0x55a0 [nranks=16] stream 0x5{i}",
    "{o} NCCL INFO {n}: opCount {i:x} sendbuff 0x1 recvbuff 0x2 count {c} datatype 7 op 0 root 0 comm 0x1 [nranks=4] "
    "stream 0x3 task 0 globalrank 1",
]
CHOICES = [
    "{o} NCCL INFO {n}: {c} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..{i}}}",
    "{o} NCCL INFO {n}: {c} Bytes -> Algo TREE proto SIMPLE channel{{Lo..Hi}}={{0..7}} cgaClusterSize 2",
    "{o} NCCL INFO {n}: {c} Bytes -> Algo 1 proto 2 time 12.{i}00000",
]
ODD = [
    "{o} NCCL INFO {n}: opCount {i:x} sendbuff 0x1 recvbuff 0x2 acc 0x3 count {c} datatype 7 op 0 root 0 comm 0x1 "
    "[nranks=4] stream 0x3",
    "{o} NCCL INFO {n}: opCount {i:x} sendbuff 0x1 recvbuff 0x2 count {c} datatype 7 op 0 root 0 comm 0x1",
    "{o} NCCL INFO {n}: opCount {i:x} sendbuff 0x1 recv",
    "{o} NCCL INFO {n}: opCount {i:x} sendbuff 0x1 recvbuff 0x2 count -1 datatype 7 op 0 root 0 comm 0x1 [nranks=4]",
    "{o} NCCL INFO {n}: opCount {o} NCCL INFO {n}: opCount 1",
    "{o} NCCL INFO {c} Bytes -> Algo 1 proto 2 time 12.000000",
    "{o} NCCL INFO {n} [Symmetric]: {c} Bytes -> Kernel AllGather_LL nchannels 8 nthreads 512 nWorks 1",
    "{o} NCCL INFO {n}:    {c} Bytes -> Algo  RING proto LL channel{{Lo..Hi}}={{0..3}}",
    "{o} NCCL INFO {n}: {c} Bytes -> Algo RING proto",
    "{o} NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
    "epoch 3, step 7: loss 0.5 -> 0.4",
    "",
]


def expanded(lines: Lines) -> list[tuple[object, ...]]:
    return [
        (*lines.kinds[pick], amount) for pick, amount in zip(lines.picks.tolist(), lines.amounts.tolist(), strict=True)
    ]


@st.composite
def logs(draw: st.DrawFn, usual: list[str], odd: list[str]) -> bytes:
    shapes = st.sampled_from([*usual, *odd])
    lines = [
        draw(st.sampled_from(PREFIXES))
        + draw(shapes).format(
            o=draw(st.sampled_from(OWNERS)),
            n=draw(st.sampled_from(["AllGather", "ReduceScatter", "Send"])),
            i=draw(st.integers(0, 999)),
            c=draw(st.integers(0, 10**15 - 1)),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]
    end = draw(st.sampled_from(["\n", "", "\r\n"]))
    return (end or "\n").join(lines).encode() + end.encode()


class Odd(Fields):
    """No column has the usual form: all is read line by line."""

    def integers(self, column: Integers, base: int = 10) -> None:
        return None

    def texts(self, first: Integers, last: Integers) -> None:
        return None


@contextmanager
def line_by_line(module: ModuleType) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Fields", Odd)
        yield


@pytest.mark.parametrize("read", [nccl_debug_lines.calls, nccl_debug_lines.choices])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_log_lines_as_columns_or_one_by_one(read: Callable[[bytes], Lines], data: st.DataObject) -> None:
    usual = CALLS if read is nccl_debug_lines.calls else CHOICES
    text = data.draw(st.one_of(logs(usual, []), logs(usual, ODD), logs([*CALLS, *CHOICES], ODD)))
    quick = read(text)
    with line_by_line(nccl_debug_lines):
        careful = read(text)
    assert expanded(quick) == expanded(careful)
    assert quick.n_damaged == careful.n_damaged
    if read is nccl_debug_lines.calls:
        assert quick.op_counts.tolist() == careful.op_counts.tolist()


CELLS = st.sampled_from(["8", "-1", "", " 4 ", "x", "1e3", "nan", "100.5", "0.000001", "123456789012345678", "9" * 300])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_csv_rows_at_once_or_one_by_one(tmp_path: Path, data: st.DataObject) -> None:
    names = st.sampled_from(["ring", "default", "-1", "", "tree", "nonsense", "é"])
    rows = [
        f"{data.draw(st.sampled_from(['allgather', 'allreduce', '?']))},{data.draw(CELLS)},{data.draw(names)},"
        f"{data.draw(st.sampled_from(['ll', 'simple', 'default']))},{data.draw(CELLS)},2,16,{data.draw(CELLS)}"
        + data.draw(st.sampled_from(["", "", "", ",more", "\n", "\n# a remark"]))
        for _ in range(data.draw(st.integers(1, 8)))
    ]
    path = tmp_path / "t.csv"
    header = "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,latency_us"
    path.write_text("\n".join([header, *rows, ""]))
    trace = read_trace(path)
    quick, told = list(trace.blocks()), dict(trace.summary.unusable)
    with line_by_line(tuner_csv):
        trace = read_trace(path)
        careful = list(trace.blocks())
    assert [block.tobytes() for block in quick] == [block.tobytes() for block in careful]
    assert told == trace.summary.unusable
