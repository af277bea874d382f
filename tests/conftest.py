"""Before any test imports torch: one thread per process, as ranks have, so that sums add up alike.

Ranks that tests start take seconds to import torch and what comes with its first optimizer: one process does it,
and they are its forks. There is one such server in a test run, whoever needs it first.
"""

import gc
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ZEROTUNE_DAEMON"] = "0"  # tests that want one ask for it, and end it
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
)

# A test on a busy machine is as right as on a quiet one.
settings.register_profile("any machine", deadline=None, max_examples=50)
settings.load_profile("any machine")

# Typer builds all commands anew at each call: of a command line that is once, of tests it is hundreds of times.
typer.main.get_command = cache(typer.main.get_command)


def pytest_collection_finish():
    """What imports and collection made stays: looking through all of it again and again takes seconds."""
    gc.freeze()
    gc.enable()


def pytest_configure():
    """No garbage is looked for until all is imported.

    Tests interrupt what they start, which inherits that shells leave what is in the background out of Ctrl-C.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """Socket paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="zt-") as name:
        yield Path(name)
