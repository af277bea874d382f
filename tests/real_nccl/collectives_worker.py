"""One rank whose collectives the mock passes on: `RANK N_RANKS FOLDER LIBNCCL`; 0 where all bytes are right.

Once with a communicator that blocks, once with one that does not, and once with a child of that.
"""

import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.rehearse.mock_gpu import MockGpu
from zerotune.agent.nccl.libnccl import IN_PROGRESS, Libnccl, UniqueId, non_blocking_config
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.twin.machines import MACHINES

FLOAT32, SUM, MAXIMUM = 7, 0, 2
COUNT = 1000

rank, n_ranks, folder, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
topology = folder / f"topology{rank}.xml"
topology.write_text(MACHINES["dgx_h100"].topology())
mock = MockGpu(in_front=True)
mock.set_machine(read_machine(topology), "node")
nccl = Libnccl(path)
mock.attach(path, nccl.library, nccl.version)
mock.stand_in_front_of(nccl.library)
mock.set_prices(lambda *_: 10.0, noise=0.0, kernel_us=1.0, flops_per_ns=1.0)
mock.set_device(rank)
api = ctypes.CDLL(str(mock.path))
api.mock_cuda_function.restype = ctypes.c_void_p
pointer, count = ctypes.c_void_p, ctypes.c_size_t


def unique_id(name):
    """Alike on all ranks."""
    path = folder / name
    if rank == 0:
        (folder / "part").write_bytes(nccl.unique_id())
        (folder / "part").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return UniqueId.of(path.read_bytes())


def device_array(n):
    """Device memory as numpy sees it, with its address."""
    address = mock.malloc(4 * n)
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(address)), pointer(address)


def arrives(array, expected):
    """Whether the numbers come within a while: nobody synchronises here."""
    ends_s = time.monotonic() + 60
    while not np.array_equal(array, expected):
        assert time.monotonic() < ends_s, (rank, array, expected)
        time.sleep(0.005)


def done(code, communicator):
    """What a call of a communicator has come to."""
    state = ctypes.c_int(code)
    while state.value == IN_PROGRESS:
        assert api.ncclCommGetAsyncError(communicator, ctypes.byref(state)) == 0
    assert state.value == 0, state.value


def synchronize():
    """Until all that was called is over."""
    assert ctypes.CFUNCTYPE(ctypes.c_int)(api.mock_cuda_function(b"cudaDeviceSynchronize"))() == 0


everything = [np.arange(COUNT * n_ranks, dtype=np.float32) + 1 + each for each in range(n_ranks)]
mine, from_ = device_array(COUNT * n_ranks)
mine[:] = everything[rank]
everywhere, to_all = device_array(COUNT * n_ranks)
share, to_share = device_array(COUNT)
total = sum(everything)


def use(communicator):
    """Every collective, in turn."""

    def call(name, *arguments):
        done(getattr(api, name)(*arguments, communicator, None), communicator)

    everywhere[:] = share[:] = 0
    call("ncclAllReduce", from_, to_all, count(mine.size), FLOAT32, SUM)
    arrives(everywhere, total)
    call("ncclReduceScatter", from_, to_share, count(COUNT), FLOAT32, SUM)
    arrives(share, total[rank * COUNT : (rank + 1) * COUNT])
    call("ncclAllGather", to_share, to_all, count(COUNT), FLOAT32)
    arrives(everywhere, total)
    call("ncclBroadcast", from_, to_all, count(mine.size), FLOAT32, n_ranks - 1)
    arrives(everywhere, everything[-1])
    call("ncclAllReduce", to_all, to_all, count(mine.size), FLOAT32, MAXIMUM)
    api.ncclGroupStart()  # to the next rank, from the one before
    api.ncclSend(from_, count(COUNT), FLOAT32, (rank + 1) % n_ranks, communicator, None)
    api.ncclRecv(to_share, count(COUNT), FLOAT32, (rank - 1) % n_ranks, communicator, None)
    done(api.ncclGroupEnd(), communicator)
    arrives(share, everything[rank - 1][:COUNT])
    call("ncclAllReduce", from_, to_all, count(mine.size), FLOAT32, SUM)  # a barrier
    arrives(everywhere, total)


blocking, eager, child = pointer(), pointer(), pointer()
assert api.ncclCommInitRank(ctypes.byref(blocking), n_ranks, unique_id("first"), rank) == 0
use(blocking)

config = non_blocking_config()
made = api.ncclCommInitRankConfig(ctypes.byref(eager), n_ranks, unique_id("second"), rank, ctypes.byref(config))
assert made == IN_PROGRESS
done(made, eager)
use(eager)
assert api.ncclCommSplit(eager, 0, rank, ctypes.byref(child), ctypes.byref(config)) == 0
done(IN_PROGRESS, eager)
done(IN_PROGRESS, child)
use(child)
for each in (child, eager):
    done(nccl.library.ncclCommFinalize(each), each)
    assert api.ncclCommDestroy(each) == 0

assert mock.n_freed_uses() == 0
mock.free(to_share.value)
api.ncclAllGather(to_share, to_all, count(COUNT), FLOAT32, blocking, None)
synchronize()
assert mock.n_freed_uses() == 1
arrives(everywhere, total)  # nothing was taken from where it lay
os._exit(0)
