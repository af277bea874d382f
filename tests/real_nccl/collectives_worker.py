"""One rank whose collectives the mock passes on: `RANK N_RANKS FOLDER LIBNCCL`; 0 where all bytes are right."""

import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np

from zerotune.agent.nccl.libnccl import Libnccl, UniqueId
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.mock_cuda.mock import MockCuda
from zerotune.agent.nccl.twin.machines import MACHINES

FLOAT32, SUM, MAXIMUM = 7, 0, 2
COUNT = 1000

rank, n_ranks, folder, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
topology = folder / f"topology{rank}.xml"
topology.write_text(MACHINES["dgx_h100"].topology())
mock = MockCuda(in_front=True)
mock.lend(read_machine(topology), "node")
nccl = Libnccl(path)
mock.attach(path, nccl.library, nccl.version)
mock.stand_in_front_of(nccl.library)
mock.set_prices(lambda *_: 10.0, noise=0.0, kernel_us=1.0, flops_per_ns=1.0)
mock.set_device(rank)
api = ctypes.CDLL(str(mock.path))
api.mock_cuda_function.restype = ctypes.c_void_p
pointer, count = ctypes.c_void_p, ctypes.c_size_t

id_file = folder / "id"
if rank == 0:
    (folder / "id.part").write_bytes(nccl.unique_id())
    (folder / "id.part").rename(id_file)
while not id_file.exists():
    time.sleep(0.01)
communicator = pointer()
assert api.ncclCommInitRank(ctypes.byref(communicator), n_ranks, UniqueId.of(id_file.read_bytes()), rank) == 0


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


def synchronize():
    """Until all that was called is over."""
    assert ctypes.CFUNCTYPE(ctypes.c_int)(api.mock_cuda_function(b"cudaDeviceSynchronize"))() == 0


everything = [np.arange(COUNT * n_ranks, dtype=np.float32) + 1 + each for each in range(n_ranks)]
mine, from_ = device_array(COUNT * n_ranks)
mine[:] = everything[rank]
everywhere, to_all = device_array(COUNT * n_ranks)
share, to_share = device_array(COUNT)
total = sum(everything)
where = (communicator, None)
api.ncclAllReduce(from_, to_all, count(mine.size), FLOAT32, SUM, *where)
arrives(everywhere, total)
api.ncclReduceScatter(from_, to_share, count(COUNT), FLOAT32, SUM, *where)
arrives(share, total[rank * COUNT : (rank + 1) * COUNT])
api.ncclAllGather(to_share, to_all, count(COUNT), FLOAT32, *where)
arrives(everywhere, total)
api.ncclBroadcast(from_, to_all, count(mine.size), FLOAT32, n_ranks - 1, *where)
arrives(everywhere, everything[-1])
api.ncclAllReduce(to_all, to_all, count(mine.size), FLOAT32, MAXIMUM, *where)
api.ncclGroupStart()  # to the next rank, from the one before
api.ncclSend(from_, count(COUNT), FLOAT32, (rank + 1) % n_ranks, *where)
api.ncclRecv(to_share, count(COUNT), FLOAT32, (rank - 1) % n_ranks, *where)
api.ncclGroupEnd()
arrives(share, everything[rank - 1][:COUNT])
api.ncclAllReduce(from_, to_all, count(mine.size), FLOAT32, SUM, *where)  # a barrier
arrives(everywhere, total)
assert mock.n_freed_uses() == 0
mock.free(to_share.value)
api.ncclAllGather(to_share, to_all, count(COUNT), FLOAT32, *where)
synchronize()
assert mock.n_freed_uses() == 1
arrives(everywhere, total)  # nothing was taken from where it lay
os._exit(0)
