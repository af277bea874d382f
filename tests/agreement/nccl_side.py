"""Communicators as NCCL holds them, on copies of the real plugin. The answer shows what a call ran under."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

from zerotune.agent.nccl import library
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol

N_CELLS = 21
NO_PLAN = -1


class Side:
    """One rank's side of one communicator, under tuner v5."""

    def __init__(self, plugin: library.Plugin, comm_id: int, n_ranks: int, n_nodes: int = 1) -> None:
        members = (ctypes.c_void_p * 4).in_dll(ctypes.CDLL(str(plugin.path)), "ncclTunerPlugin_v5")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        init = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(pointer), ctypes.c_uint64, size, size, pointer, pointer, pointer
        )(members[1])
        self._ask = ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, ctypes.c_int, size, ctypes.c_int, pointer,
            ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int),
        )(members[2])  # fmt: skip
        self._finalize = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(members[3])
        self._context = pointer()
        assert init(ctypes.byref(self._context), comm_id, n_ranks, n_nodes, None, None, None) == 0
        self.owner = int(plugin.communicators()["owner"].max())

    def call(self, message_bytes: int = 1 << 20, collective: Collective = Collective.all_gather) -> int:
        """What the call runs under: the channels that the plan asked for, NO_PLAN without a row."""
        return self.ask(collective, message_bytes)[1]

    def ask(self, collective: Collective, message_bytes: int, legal: bool = True) -> tuple[list[int], int]:
        """Cells that the plugin made cheapest, and channels it asked for."""
        untouched = 50.0 if legal else -1.0
        table = (ctypes.c_float * N_CELLS)(*([untouched] * N_CELLS))
        n_channels = ctypes.c_int(NO_PLAN)
        assert self._ask(self._context, collective, message_bytes, 1, table, 7, 3, 0, n_channels) == 0
        changed = [i for i, cost in enumerate(table) if cost != untouched]
        assert all(0.0 < table[i] < untouched for i in changed)
        return changed, n_channels.value

    def close(self) -> None:
        self._finalize(self._context)


def own_plugin(folder: Path, name: str = "plugin") -> library.Plugin:
    """A plugin with a state of its own, as another process would have it."""
    path = folder / f"{name}.so"
    shutil.copy(library.load().path, path)
    return library.Plugin(path)


def row(n_ranks: int, n_channels: int, phase: Phase | None = None) -> PlanRow:
    """For all-gathers of any size: ring and simple, which NCCL itself caps to the channels that there are."""
    candidate = Candidate(Algorithm.ring, Protocol.simple, n_channels)
    return PlanRow(CommunicatorClass(n_ranks, 1), Collective.all_gather, phase, 1, 2**40, candidate)


def plan(epoch: int, *n_ranks: int) -> Plan:
    """A plan that asks for 1 + `epoch` % 30 channels on communicators of so many ranks."""
    return Plan(epoch, tuple(row(each, channels(epoch)) for each in n_ranks))


def channels(epoch: int) -> int:
    return 1 + epoch % 30
