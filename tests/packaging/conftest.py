"""Each kind of distribution is built once, whichever of the processes that run tests needs it first."""

import fcntl
import os

import pytest
from builds import build, copy_sources


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A copy of the checkout for tests that change it or build with options."""
    return copy_sources(tmp_path_factory.mktemp("checkout") / "zerotune")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The file of a kind, of a checkout that nobody changes."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder of all workers holds one of each
        shared = shared.parent

    def of(kind):
        folder = shared / "built" / kind
        with (shared / "built.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # also because a build writes beside its sources
            checkout = shared / "checkout" / "zerotune"
            if not checkout.exists():
                copy_sources(checkout)
            if not folder.exists():
                folder.parent.mkdir(exist_ok=True)
                build(kind, checkout, shared / f"{kind}.unfinished").parent.rename(folder)
        (file,) = folder.iterdir()
        return file

    return of

