"""Slow work beside the daemon's loop: loads the knowledge of a fabric and fits its model.

A thread waits for requests. SQLite loads outside the GIL. A fit runs in a process of its own, so that the daemon has
neither its CPU time nor scikit-learn's memory.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ...store.errors import StoreError
from ...store.foreign.own_python import python_with
from ...store.records import ModelRecord
from ...store.sqlite.database import Store
from .requests import Request, RequestKind
from .trainer import keep

_log = logging.getLogger("zerotune.learner")

TRAIN_TIMEOUT_S: Final = 300.0
MAX_WAITING: Final = 2048
"""Most waiting requests: enough to load and fit all fabrics of connected jobs at once."""

Loader = Callable[[Store, str], object]
"""(store, fabric_id) -> knowledge."""


class Learner:
    """Owns thread `zerotune-learner`: serves requests one after the other.

    `load` reads the store and makes knowledge; `empty` is used if it fails. `on_ready` is called on the learner's
    thread with (fabric_id, knowledge).
    """

    def __init__(self, store: Store, load: Loader, empty: object, on_ready: Callable[[str, object], None]) -> None:
        self._store = store
        self._load = load
        self._empty = empty
        self._on_ready = on_ready
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._closing = False
        self.n_failed = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._child_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="zerotune-learner", daemon=True)
        self._thread.start()

    def ask(self, request: Request) -> None:
        """Queue a request, unless too many wait; never blocks."""
        if self._requests.qsize() < MAX_WAITING:
            self._requests.put(request)
        else:
            self.n_failed += 1

    def close(self) -> None:
        """Give up waiting requests; measurements are in the store, so nothing is lost."""
        with self._child_lock:
            self._closing = True
            if self._child is not None:
                self._child.kill()
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            if self._closing:
                continue
            try:
                if request.kind is RequestKind.train:
                    self._train(request.fabric_id)
                knowledge = self._load(self._store, request.fabric_id)
                if request.kind is RequestKind.load and self.never_fitted(request.fabric_id):
                    self.ask(Request(RequestKind.train, request.fabric_id))
            except Exception as error:
                if self._store.writing.is_gone:  # `zerotune status` has the remedy
                    _log.warning("nothing is learned about fabric %s: the store was removed", request.fabric_id)
                elif isinstance(error, subprocess.TimeoutExpired):
                    self.n_failed += 1
                    _log.warning(
                        "fitting a model of fabric %s was given up after %.0f s: is the machine that busy?",
                        request.fabric_id, error.timeout,
                    )  # fmt: skip
                else:
                    self.n_failed += 1
                    _log.exception("learning about fabric %s failed; its jobs go on with less", request.fabric_id)
                if request.kind is RequestKind.train:
                    continue
                knowledge = self._empty
            self._on_ready(request.fabric_id, knowledge)

    def never_fitted(self, fabric_id: str) -> bool:
        """Whether a fabric has measurements but no usable model, as after a daemon that ended during a fit."""
        if any(model.fabric_id == fabric_id and not model.is_damaged for model in self._store.models()):
            return False
        return len(self._store.measurements(fabric_id, limit=1)) > 0

    def _train(self, fabric_id: str) -> None:
        self._store.flush()
        if self._store.writing.is_gone:
            raise StoreError(f"{self._store.path} was removed")  # the training process would only fail as well
        model = self.fit(self._store.path, fabric_id)
        if model is not None:
            keep(self._store, model)
            self._store.flush()

    def fit(self, store_path: Path, fabric_id: str) -> ModelRecord | None:
        """A model, fitted in a process of its own; None: there is nothing to fit, or the learner closes."""
        command = [*python_with("zerotune.tuner.modeling.training_process"), str(store_path), fabric_id]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with self._child_lock:
            if self._closing:
                return None
            # A session of its own: Ctrl-C reaches only the daemon, which ends this process in `close`.
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
        try:
            fitted, _ = self._child.communicate(timeout=TRAIN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
            raise
        if self._child.returncode == -signal.SIGTERM:
            return None  # the process was ended together with the daemon: no fault
        if self._child.returncode != 0 and not self._closing:
            raise RuntimeError(f"the training process exited with {self._child.returncode}")
        return msgspec.msgpack.decode(fitted, type=ModelRecord) if fitted else None
