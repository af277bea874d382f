"""What a plan asks for is what NCCL launches, in its own library: cell by cell, told by three witnesses.

The decision (our tuner), the launched device function and channels (the mock's, which knows nothing of plans), and what
NCCL's own profiler reports, with times.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from benchmarks.lib.nccl.forced_cells import CHANNELS, CLUSTERS, SIZES, forced, offered
from zerotune.agent.nccl.libnccl import BFLOAT16_BYTES
from zerotune.agent.nccl.twin.protocol import duration_us
from zerotune.agent.nccl.twin.twin import Cluster, ask_nccl, topology_file
from zerotune.store.records import Collective, TimingSource

MARKS = {"pcie": pytest.mark.slow}
ASKS_AHEAD = (2, 29, 3)
"""Its scheduler of symmetric kernels asks first, in the very words of the deciding call, where there are such kernels:
no argument tells the two apart.
"""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in CLUSTERS])
def asked(request, release):
    """(version, rows, NCCL's answers) on one cluster."""
    version, library = release
    machine, n_nodes, ranks_per_node = CLUSTERS[request.param]
    if (version < (2, 22) or version == (2, 27, 3)) and n_nodes > 1:
        # 2.21's proxies wait for kernels, and the command refuses it, too; 2.27.3 takes no path of a network plugin
        pytest.skip(f"{version} cannot be asked about several nodes")
    with topology_file(machine) as topology:
        cluster = Cluster(topology, n_nodes, ranks_per_node)
        rows, questions = forced(version, cluster)
        answer = ask_nccl(library, cluster, questions, rows, observe=True, timeout_s=100)
    assert answer.version == version
    return version, cluster, rows, answer.answers


@pytest.mark.slow
def test_each_collective_is_decided_once(asked):
    version, cluster, _, answers = asked
    has_symmetric_kernels = cluster.n_nodes == 1 and cluster.topology.stem == CLUSTERS["one node"][0]
    assert {answer.n_decisions for answer in answers} == {1 + (version == ASKS_AHEAD and has_symmetric_kernels)}


def test_cells_that_nccl_offers_are_honoured_and_no_others(asked):
    version, _, rows, answers = asked
    n_honoured = 0
    cells = offered(version, answers)
    for row, answer in zip(rows, answers, strict=True):
        cell = (row.candidate.algorithm, row.candidate.protocol)
        is_offered = cell in cells[row.collective]
        assert (answer.matched, answer.ignored) == (is_offered, not is_offered), (row, answer)
        if is_offered:
            assert (answer.algorithm, answer.protocol) == (row.candidate.algorithm, row.candidate.protocol)
            n_honoured += 1
    assert n_honoured >= len(rows) / 3


def test_each_cell_launches_a_function_of_its_own(asked):
    version, _, rows, answers = asked
    if version < (2, 22):  # its kernels' arguments have another form, which the mock does not read
        pytest.skip("launches of 2.21 are not read")
    functions = defaultdict(set)
    for row, answer in zip(rows, answers, strict=True):
        if answer.matched:
            functions[row.collective, row.candidate.algorithm, row.candidate.protocol].add(answer.function_id)
    assert all(len(ids) == 1 for ids in functions.values()), dict(functions)
    assert len({next(iter(ids)) for ids in functions.values()}) == len(functions)


def test_launches_carry_what_was_called(asked):
    version, cluster, rows, answers = asked
    if version < (2, 22):  # its kernels' arguments have another form, which the mock does not read
        pytest.skip("launches of 2.21 are not read")
    for row, answer in zip(rows, answers, strict=True):
        n_elements = row.min_bytes // BFLOAT16_BYTES
        carried = {
            Collective.all_gather: row.min_bytes // cluster.n_ranks,  # of bytes, in NCCL
            Collective.reduce_scatter: n_elements // cluster.n_ranks,
            Collective.all_reduce: n_elements,
        }
        assert answer.count == carried[row.collective], (row, answer)


def test_no_more_channels_run_than_were_asked_for(asked):
    version, _, rows, answers = asked
    if version < (2, 22):  # its kernels' arguments have another form, which the mock does not read
        pytest.skip("launches of 2.21 are not read")
    for row, answer in zip(rows, answers, strict=True):
        assert answer.n_channels > 0
        if answer.matched and row.candidate.n_channels:
            assert answer.n_channels <= row.candidate.n_channels
    largest = [
        (row, answer)
        for row, answer in zip(rows, answers, strict=True)
        if row.min_bytes >= SIZES[-1] and answer.matched and row.candidate.n_channels == CHANNELS[1]
    ]
    assert largest
    assert all(answer.n_channels == row.candidate.n_channels for row, answer in largest)


def test_the_profiler_tells_what_ran_and_how_long(asked):
    version, cluster, rows, answers = asked
    if version < (2, 26):  # NCCL has no events of kernels yet
        pytest.skip("kernels tell no profiler of their ends")
    told = defaultdict(list)
    for ran in (ran for answer in answers for ran in answer.ran):
        told[ran.message_bytes].append(ran)
    n_late = 1 if version < (2, 27) else 0  # 2.26 tells of a kernel's end when the next one begins
    assert len(told) >= len(rows) - n_late
    for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        assert len(told[row.min_bytes]) == cluster.ranks_per_node or (n_late and place == len(rows) - 1)
        for ran in told[row.min_bytes]:
            assert (ran.algorithm, ran.protocol) == (answer.algorithm, answer.protocol)
            assert ran.n_channels == answer.n_channels
            if version >= (2, 27):
                assert ran.timing_source == TimingSource.gpu_kernel
                assert ran.duration_us == pytest.approx(duration_us(place), abs=0.01)
            else:
                assert ran.timing_source == TimingSource.cpu_kernel


def test_nothing_is_timed_where_nccl_tells_no_times(asked):
    version, _, _, answers = asked
    if version >= (2, 26):  # then the test above holds their times
        pytest.skip("kernels tell their times")
    assert not [ran for answer in answers for ran in answer.ran]
