"""What CUDA documents of memory that is freed, on the mock GPU. mock_memory.py NAME runs one of the functions below."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mock_streams import FUNCTION, KERNEL_MS, NON_BLOCKING, Grid, cuda, event, launch, library, run, stream

N_BYTES = 1 << 16
CONTENT = 7
library.mock_cuda_n_freed_uses.restype = ctypes.c_uint64


def allocated(on: ctypes.c_void_p | None = None, n_bytes: int = N_BYTES) -> ctypes.c_void_p:
    """Device memory that holds CONTENT; in the order of streams where one is named."""
    made = ctypes.c_void_p()
    if on is None:
        assert cuda("cudaMalloc", ctypes.byref(made), ctypes.c_size_t(n_bytes)) == 0
    else:
        assert cuda("cudaMallocAsync", ctypes.byref(made), ctypes.c_size_t(n_bytes), on) == 0
    ctypes.memset(made, CONTENT, n_bytes)
    return made


def clear(memory: ctypes.c_void_p, on: ctypes.c_void_p) -> None:
    assert cuda("cudaMemsetAsync", memory, ctypes.c_int(0), ctypes.c_size_t(N_BYTES), on) == 0


def content(memory: ctypes.c_void_p) -> set[int]:
    return set(ctypes.string_at(memory, N_BYTES))


def behind(on: ctypes.c_void_p, first: ctypes.c_void_p) -> None:
    assert cuda("cudaStreamWaitEvent", on, event(first), ctypes.c_uint(0)) == 0


def freeing_waits_for_all_that_runs_and_leaves_nothing() -> None:
    memory = allocated()
    launch(stream(NON_BLOCKING))
    begin_s = time.monotonic()
    assert cuda("cudaFree", memory) == 0
    assert time.monotonic() - begin_s > 0.9 * KERNEL_MS / 1e3
    assert not content(memory) & {CONTENT, 0}


@contextmanager
def held_up(on: ctypes.c_void_p) -> Iterator[None]:
    """A host function runs in the stream all the while."""
    began, goes_on = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        began.set()
        assert goes_on.wait(60)

    function = FUNCTION(wait)
    thread = threading.Thread(target=lambda: cuda("cudaLaunchHostFunc", on, function, None))
    thread.start()
    assert began.wait(60)
    yield
    goes_on.set()
    assert cuda("cudaStreamSynchronize", on) == 0
    thread.join()


def freeing_in_a_stream_takes_its_turn() -> None:
    own = stream(NON_BLOCKING)
    memory = allocated(own)
    with held_up(own):
        assert cuda("cudaFreeAsync", memory, own) == 0
        assert content(memory) == {CONTENT}
    assert not content(memory) & {CONTENT, 0}


def freed_memory_has_no_new_owner_before_the_gpu_is_there() -> None:
    own = stream(NON_BLOCKING)
    memory = allocated(own)
    launch(own)
    assert cuda("cudaFreeAsync", memory, own) == 0
    assert allocated(own).value != memory.value
    assert cuda("cudaStreamSynchronize", own) == 0
    assert allocated(own).value == memory.value


def used_after_its_end() -> None:
    freeing, using = stream(NON_BLOCKING), stream(NON_BLOCKING)
    memory = allocated(freeing)
    assert cuda("cudaFreeAsync", memory, freeing) == 0
    clear(memory, using)
    assert cuda("cudaStreamSynchronize", using) == 0
    assert library.mock_cuda_n_freed_uses() == 1
    assert not content(memory) & {CONTENT, 0}


def used_at_its_end() -> None:
    """Freed while a kernel of another stream has not come to it."""
    freeing, using = stream(NON_BLOCKING), stream(NON_BLOCKING)
    memory = allocated(freeing)
    launch(using)
    clear(memory, using)
    assert cuda("cudaFreeAsync", memory, freeing) == 0
    assert cuda("cudaDeviceSynchronize") == 0
    assert library.mock_cuda_n_freed_uses() == 1


def used_by_who_had_it_before() -> None:
    freeing, using = stream(NON_BLOCKING), stream(NON_BLOCKING)
    memory = allocated(freeing)
    with held_up(using):
        clear(memory, using)
        assert cuda("cudaFreeAsync", memory, freeing) == 0
        assert cuda("cudaStreamSynchronize", freeing) == 0
        assert allocated(freeing).value == memory.value
    assert library.mock_cuda_n_freed_uses() == 1
    assert content(memory) == {CONTENT}
    clear(memory, freeing)  # its new owner's use is one
    assert cuda("cudaStreamSynchronize", freeing) == 0
    assert library.mock_cuda_n_freed_uses() == 1


def used_by_a_kernel_of_torchs() -> None:
    """Registered as a library does, and launched on memory that is freed."""
    name = b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_10AbsFunctorIfEESt5arrayIPcLm2EEEEviT0_T1_"
    kernel, kept = ctypes.create_string_buffer(16), ctypes.create_string_buffer(name)
    functor, n_elements, one_block = ctypes.c_char(), ctypes.c_int(4), Grid(1, 1, 1)
    register = ctypes.CFUNCTYPE(None, *4 * [ctypes.c_void_p])(library.mock_cuda_function(b"__cudaRegisterFunction"))
    register(None, ctypes.addressof(kernel), None, ctypes.addressof(kept))
    own = stream(NON_BLOCKING)
    source, result = allocated(own), allocated(own)
    pointers = (ctypes.c_void_p * 2)(result, source)
    parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (n_elements, functor, pointers)))
    launched = (kernel, one_block, one_block, parameters, ctypes.c_size_t(0), own)
    assert cuda("cudaLaunchKernel", *launched) == 0
    assert library.mock_cuda_n_freed_uses() == 0
    assert cuda("cudaFreeAsync", source, own) == 0
    assert cuda("cudaLaunchKernel", *launched) == 0
    assert cuda("cudaStreamSynchronize", own) == 0
    assert library.mock_cuda_n_freed_uses() == 1


def unmapped_by_a_library() -> None:
    """As a segment of torch's that grew: nothing waits, and nothing is there afterwards."""
    create, reserve, map_at, unmap = (
        getattr(library, name) for name in ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemUnmap")
    )
    n_bytes, handle, address = 2 << 20, ctypes.c_uint64(), ctypes.c_uint64()
    assert create(ctypes.byref(handle), ctypes.c_size_t(n_bytes), None, ctypes.c_uint64(0)) == 0
    size, nothing = ctypes.c_size_t(n_bytes), ctypes.c_uint64(0)
    assert reserve(ctypes.byref(address), size, ctypes.c_size_t(0), nothing, nothing) == 0
    assert map_at(address, size, ctypes.c_size_t(0), handle, nothing) == 0
    using = stream(NON_BLOCKING)
    clear(ctypes.c_void_p(address.value), using)
    assert cuda("cudaStreamSynchronize", using) == 0
    assert library.mock_cuda_n_freed_uses() == 0
    assert unmap(address, size) == 0
    clear(ctypes.c_void_p(address.value), using)
    assert cuda("cudaStreamSynchronize", using) == 0
    assert library.mock_cuda_n_freed_uses() == 1


def used_in_order() -> None:
    freeing, using = stream(NON_BLOCKING), stream(NON_BLOCKING)
    memory = allocated(freeing)
    launch(using)
    clear(memory, using)
    behind(freeing, using)
    assert cuda("cudaFreeAsync", memory, freeing) == 0
    gone = stream(NON_BLOCKING)  # its work is waited for, though it is destroyed
    memory = allocated()
    launch(gone)
    clear(memory, gone)
    assert cuda("cudaStreamDestroy", gone) == 0
    assert cuda("cudaFree", memory) == 0
    assert library.mock_cuda_n_freed_uses() == 0


if __name__ == "__main__":
    run(globals())
