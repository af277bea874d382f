"""What CUDA documents of streams, on the mock GPU. mock_streams.py NAME runs one of the functions below."""

from __future__ import annotations

import ctypes
import sys
import threading
import time

from benchmarks.rehearse.mock_gpu import MOCK_GPU

KERNEL_MS, HOST_MS = 100.0, 25.0
NON_BLOCKING, NOT_READY = 1, 600
library = ctypes.CDLL(str(MOCK_GPU.build()))
library.mock_cuda_function.restype = ctypes.c_void_p
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PRICE = ctypes.CFUNCTYPE(ctypes.c_double)
_price = _PRICE(lambda: 0.0)


class Grid(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


def cuda(name: str, *arguments: object) -> int:
    address = library.mock_cuda_function(name.encode())
    assert address, name
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)(*arguments))


def stream(flags: int = 0) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    assert cuda("cudaStreamCreateWithFlags", ctypes.byref(made), ctypes.c_uint(flags)) == 0
    return made


def event(on: ctypes.c_void_p | None) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    assert cuda("cudaEventCreate", ctypes.byref(made)) == 0
    assert cuda("cudaEventRecord", made, on) == 0
    return made


def launch(on: ctypes.c_void_p | None) -> None:
    grid = Grid(1, 1, 1)
    assert cuda("cudaLaunchKernel", ctypes.c_void_p(16), grid, grid, None, ctypes.c_size_t(0), on) == 0


def between_ms(first: ctypes.c_void_p, second: ctypes.c_void_p) -> float:
    elapsed_ms = ctypes.c_float()
    assert cuda("cudaDeviceSynchronize") == 0
    assert cuda("cudaEventElapsedTime", ctypes.byref(elapsed_ms), first, second) == 0
    return elapsed_ms.value


def the_legacy_stream_waits_for_the_others_and_they_for_it() -> None:
    blocking, apart = stream(), stream(NON_BLOCKING)
    begin = event(None)
    launch(blocking)
    launch(None)
    launch(blocking)
    assert between_ms(begin, event(blocking)) > 2.9 * KERNEL_MS
    begin = event(None)
    launch(None)
    launch(apart)
    assert between_ms(begin, event(apart)) < 1.9 * KERNEL_MS
    flags = ctypes.c_uint()
    for each, expected in ((blocking, 0), (apart, NON_BLOCKING), (None, 0)):
        assert cuda("cudaStreamGetFlags", each, ctypes.byref(flags)) == 0
        assert flags.value == expected


def slowly_on(on: ctypes.c_void_p, order: list[str]) -> threading.Thread:
    """A host function runs in the stream, for longer than the rest of a test takes."""
    began, goes_on = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        began.set()
        goes_on.wait(KERNEL_MS / 1e3)
        order.append("slow")

    def run() -> None:
        assert cuda("cudaLaunchHostFunc", on, FUNCTION(slow), None) == 0

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(60)
    return thread


def the_legacy_stream_waits_for_what_has_not_ended() -> None:
    order: list[str] = []
    thread = slowly_on(stream(), order)
    behind = FUNCTION(lambda _: order.append("legacy"))
    assert cuda("cudaLaunchHostFunc", None, behind, None) == 0
    assert cuda("cudaDeviceSynchronize") == 0
    thread.join()
    assert order == ["slow", "legacy"]


def a_destroyed_stream_is_worked_off() -> None:
    """The call returns at once; the device completes what was in the stream."""
    order: list[str] = []
    gone = stream(NON_BLOCKING)
    thread = slowly_on(gone, order)
    behind = FUNCTION(lambda _: order.append("behind"))
    assert cuda("cudaLaunchHostFunc", gone, behind, None) == 0
    assert cuda("cudaStreamDestroy", gone) == 0
    assert order == []
    assert cuda("cudaDeviceSynchronize") == 0
    thread.join()
    assert order == ["slow", "behind"]


def the_gpu_waits_for_the_host() -> None:
    own = stream(NON_BLOCKING)
    nothing = FUNCTION(lambda _: None)
    begin = event(own)
    for _ in range(2):
        launch(own)
        assert cuda("cudaLaunchHostFunc", own, nothing, None) == 0
    took_ms = between_ms(begin, event(own))
    assert 2 * (KERNEL_MS + HOST_MS) <= took_ms < 2 * (KERNEL_MS + HOST_MS) + 0.9 * HOST_MS, took_ms


def hosts_run_ahead_as_far_as_the_queue_reaches() -> None:
    for n_kernels, expected in ((0, 3), (2, 1), (1024, 0)):
        library.mock_cuda_set_queue(n_kernels)
        own = stream(NON_BLOCKING)
        begin_s = time.monotonic()
        for _ in range(3):
            launch(own)
        waited_ms = 1e3 * (time.monotonic() - begin_s)
        assert (expected - 0.1) * KERNEL_MS < waited_ms < (expected + 0.9) * KERNEL_MS, (n_kernels, waited_ms)
        assert cuda("cudaStreamQuery", own) == (NOT_READY if n_kernels else 0)
        assert cuda("cudaStreamSynchronize", own) == 0


def hosts_that_replay_graphs_run_ahead_no_further() -> None:
    library.mock_cuda_set_queue(2)
    captures, own, graph = stream(NON_BLOCKING), stream(NON_BLOCKING), ctypes.c_void_p()
    assert cuda("cudaStreamBeginCapture", captures, ctypes.c_int(0)) == 0
    launch(captures)
    assert cuda("cudaStreamEndCapture", captures, ctypes.byref(graph)) == 0
    begin_s = time.monotonic()
    for _ in range(3):
        assert cuda("cudaGraphLaunch", graph, own) == 0
    assert KERNEL_MS * 0.9 < 1e3 * (time.monotonic() - begin_s) < KERNEL_MS * 1.9
    assert cuda("cudaStreamSynchronize", own) == 0


def run(functions: dict) -> None:
    """The function that the command line names, on a GPU whose kernels take KERNEL_MS."""
    prices = (0.0, KERNEL_MS * 1e3, 1.0, HOST_MS * 1e3)
    library.mock_cuda_set_prices(_price, *map(ctypes.c_double, prices))
    functions[sys.argv[1]]()


if __name__ == "__main__":
    run(globals())
