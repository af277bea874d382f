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
from zerotune.tuner.traces.columns import MAX_TEXT_BYTES, Fields, Integers
from zerotune.tuner.traces.nccl import nccl_debug_lines, nccl_tests, tuner_csv
from zerotune.tuner.traces.nccl.nccl_debug_lines import Lines

WORDS = st.one_of(
    st.integers(0, 10**17).map(str),
    st.decimals(0, 10**9, places=3).map(str),
    st.sampled_from(
        ["", "7.", ".5", "1e5", "-1", "+2", "0x1f", "1f", "00012", "1.2.3", "nan", "12.3456789", "a" * 300]
    ),
    st.text("abc01.", max_size=20),
)


@settings(max_examples=80)
@given(st.lists(st.lists(WORDS, min_size=3, max_size=3), min_size=1, max_size=6), st.booleans())
def test_columns_read_as_python_does(rows: list[list[str]], squeeze: bool) -> None:
    if squeeze:
        rows = [[word or "0" for word in row] for row in rows]
    text = "\n".join(("   " if squeeze else " ").join(row) for row in rows).encode()
    fields = Fields(text, b" ")
    columns = None
    if squeeze:
        columns, first, n_fields = fields.full()
    else:
        first, n_fields = fields.lines()
    assert n_fields[: len(rows)].tolist() == [3] * len(rows)
    first = first[: len(rows)]
    for place in range(3):
        words = [row[place] for row in rows]
        column = first + place if columns is None else columns[first + place]
        integers, decimals, hexadecimals = (
            fields.integers(column), fields.decimals(column), fields.integers(column, 16),
        )  # fmt: skip
        if integers is not None:
            assert integers.tolist() == [int(word) for word in words]
        elif all(word.isascii() and word.isdigit() and len(word) < 16 for word in words):
            pytest.fail("plain whole numbers are read")
        if hexadecimals is not None:
            assert hexadecimals.tolist() == [int(word, 16) for word in words]
        if decimals is not None:
            assert decimals.tolist() == [float(word) for word in words]
        elif all(len(word) < 12 and word[-4:-3] == "." and word.replace(".", "", 1).isdigit() for word in words):
            pytest.fail("plain numbers are read")
        texts = fields.texts(column, column)
        if texts is not None:
            assert [texts[1][pick] for pick in texts[0]] == [word.encode() for word in words]
            assert len(set(texts[1])) == len(texts[1])
        else:
            assert max(map(len, words)) > MAX_TEXT_BYTES
        assert fields.are(column, b"00012").tolist() == [word == "00012" for word in words]
    whole = fields.texts(first, first + 2) if columns is None else fields.texts(columns[first], columns[first + 2])
    if whole is not None:
        assert [whole[1][pick] for pick in whole[0]] == text.split(b"\n")


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


TABLE = (
    "# nThread 1\n# Collective test starting: all_gather_perf\n#  Rank  0 Group  0 Pid 1 on node device  0 [0] H\n"
    "#   size   count   type   redop  root  time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
)
TIMES = st.sampled_from(["20.25", "7", "1234567", "0.50", "1e+06", "12345.678", "0.00", "nan", "-3"])
WRONG = st.sampled_from(["0", "0", "0", "N/A", "1e-06", "4", "x"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tables_at_once_or_line_by_line(tmp_path: Path, data: st.DataObject) -> None:
    usual = data.draw(st.booleans())
    times, wrong = (st.just("20.25"), st.just("0")) if usual else (TIMES, WRONG)
    bandwidths = st.sampled_from(["0.75", "12.5e+3"] if usual else ["0.75", "inf", "1.2.3"])
    rows = [
        f"{data.draw(st.integers(0, 1 << 40)):12d} {16:12d}     float    {data.draw(st.sampled_from(['none', 'sum']))}"
        f"      -1  {data.draw(times)}   1.00  {data.draw(bandwidths)}   {data.draw(wrong)}"
        f"   {data.draw(times)}  1.00  0.75  {data.draw(wrong)}{data.draw(st.sampled_from(['', '  ']))}"
        for _ in range(data.draw(st.integers(1, 8)))
    ]
    path = tmp_path / "table.txt"
    path.write_text(TABLE + "\n".join(rows) + "\n")
    quick = [block.tobytes() for block in read_trace(path).blocks()]
    with line_by_line(nccl_tests):
        careful = [block.tobytes() for block in read_trace(path).blocks()]
    assert b"".join(quick) == b"".join(careful)


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
