"""Ends calls of the library that would wait for ever: ranks that called, or decided, different things.

NCCL connects an algorithm when it is first used, and waits for its peers inside the call. So each rank announces what
it is about to call; a rank that is still inside after a while looks at what the others announced, and whether they have
gone on. Where they cannot come together, it aborts its communicator, whereupon the library returns. On its way out NCCL
still reads the communicator, so it is given up only then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from zerotune.agent.nccl.emulated.errors import CallMismatch, CollectiveTimeout, EmulatedNcclError, SettingDisagreement
from zerotune.agent.nccl.emulated.transport.rendezvous import Header, Rendezvous

_LOOK_EVERY_S: Final = 0.25
ALONE_S: Final = 10.0
"""How long a rank may go on connecting after another has launched: on a busy machine, they finish seconds apart."""


class _Inside:
    """A rank inside the library."""

    def __init__(
        self, announced: Rendezvous, index: int, timeout_us: int, abort: Callable[[threading.Event], None]
    ) -> None:
        self.announced, self.index, self.abort = announced, index, abort
        self.timeout_s = timeout_us / 1e6
        self.since_s = time.monotonic()
        self.alone_since_s: float | None = None
        self.error: EmulatedNcclError | None = None
        self.returned = threading.Event()
        self.aborting: threading.Thread | None = None

    def look(self, now_s: float) -> None:
        """Stop the library if it would be inside for ever."""
        if self.error is None and now_s - self.since_s > _LOOK_EVERY_S:
            self.error = self.find_error(now_s)
            if self.error is not None:
                self.aborting = threading.Thread(target=self.abort, args=(self.returned,), daemon=True)
                self.aborting.start()

    def leave(self) -> None:
        """The library has returned."""
        self.returned.set()
        if self.aborting is not None:
            self.aborting.join()

    def find_error(self, now_s: float) -> EmulatedNcclError | None:
        """What keeps this rank inside for ever, if anything does."""
        try:
            self.announced.wait(self.index, 0)
        except CollectiveTimeout:
            if now_s - self.since_s > self.timeout_s:
                return CollectiveTimeout(
                    f"not every rank came to join the collective within the timeout of {self.timeout_s:.1f} s"
                )
            return None
        except EmulatedNcclError as error:
            return error
        joined = self.announced.join(self.index)
        if joined.call_rank >= 0:
            return CallMismatch(f"rank {joined.call_rank} called another collective than rank 0")
        gone = [rank for rank in range(self.announced.n_ranks) if self.announced.n_consumed(rank) > self.index]
        if not gone:
            return None
        self.alone_since_s = self.alone_since_s or now_s
        if now_s - self.alone_since_s < ALONE_S:
            return None
        return SettingDisagreement(
            f"rank {gone[0]} has launched the collective, and rank {self.announced.rank} still connects an algorithm: "
            "they decided differently; the real NCCL would hang"
        )


_inside: list[_Inside] = []
_lock = threading.Lock()
_someone = threading.Event()
_thread: threading.Thread | None = None


@contextmanager
def watched(
    announced: Rendezvous, header: Header, timeout_us: int, abort: Callable[[threading.Event], None]
) -> Iterator[None]:
    """Announce a call, and watch over the library while it runs.

    Args:
        announced: where ranks announce the calls of one communicator.
        header: what is called.
        timeout_us: how long others may stay away.
        abort: makes the library return, and gives the communicator up once the event says that it has.

    Yields:
        Nothing; call the library inside.

    Raises:
        CallMismatch, SettingDisagreement, CollectiveTimeout, EmulatedNcclError: the library had to be stopped.
    """
    global _thread
    while (index := announced.publish(header, [])) < 0:
        announced.wait_consumed(announced.n_consumed(announced.rank) - 1, timeout_us)
    one = _Inside(announced, index, timeout_us, abort)
    with _lock:
        _inside.append(one)
        if _thread is None:
            _thread = threading.Thread(target=_watch, name="zerotune-nccl-watchdog", daemon=True)
            _thread.start()
    _someone.set()
    try:
        yield
    except Exception:
        if one.error is None:
            raise
    finally:
        with _lock:
            _inside.remove(one)
        one.leave()
        announced.consume(index)
    if one.error is not None:
        raise one.error


def _watch() -> None:
    while True:
        _someone.wait()
        time.sleep(_LOOK_EVERY_S)
        with _lock:
            for one in _inside:
                one.look(time.monotonic())
            if not _inside:
                _someone.clear()
