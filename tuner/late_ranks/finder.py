"""Finds late ranks and slow communicators in joined records."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...store.records.lateness import MAX_NAMED, Lateness, LateRank, SlowCommunicator
from .blame import blamed
from .persistence import BEGUN_ANEW_STEPS, GROUP_BITS, LEAST_STEPS, OPEN_STEPS, RECENT_STEPS, Excess, ExcessWindow
from .waits import TOGETHER, Floats, Ints, behind_the_others, medians

LEAST_LATE_US: Final = 20.0
"""Least lateness: a rank's arrival varies by this much anyway."""
MATTERS: Final = 0.01
"""Least lateness that is reported, as a share of a step's time."""
SLOWER: Final = 0.1
"""A communicator is slow if it takes this share longer than its siblings."""
MANY_RECORDS: Final = 8192
"""If one join has more, every second step is left out from then on: a sample also shows persistent lateness."""
MOST_SKIPPED: Final = 64
MAX_COMMUNICATORS: Final = 1024
WHOLE_NODE_STEPS: Final = 4 * LEAST_STEPS
"""A node is named as a whole once it has been late for this many steps without a named rank: before that, one of its
ranks may still be proven, or may just have stopped being late."""

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_TOGETHER: Final = np.array([int(one) for one in TOGETHER], np.int64)


class LateRankFinder:
    """The late ranks of one job, as one daemon finds them.

    Ranks of this node are compared with one another. If other nodes' daemons report, too, nodes are compared by their
    last arrivals, and each daemon reports its own late ranks.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, int] = {}
        """Ranks of each other node, by its number among the reporters (its lowest rank)."""
        self.hosts: dict[int, str] = {}
        """Names of the nodes that ranks run on, by rank."""
        self._of_nodes: dict[int, Lateness] = {}
        self._explained_up_to: dict[int, int] = {}
        """By node, the newest step in which named ranks explained its lateness."""
        self._ranks, self._node_window, self._communicators = ExcessWindow(), ExcessWindow(), ExcessWindow()
        self._index_of: dict[int, int] = {}
        self._members: list[frozenset[int]] = []
        self._ranks_of: list[tuple[int, ...]] = []
        self._own_node, self._n_own_ranks = 0, 0
        self._own: tuple[LateRank, ...] = ()
        self._freed, self._is_freed = ExcessWindow(), False
        self._open: dict[int, _Step] = {}
        self._n_calls: dict[int, float] = {}
        """By communicator, the calls in the newest closed step."""
        self._closed: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._past: deque[LateRank] = deque(maxlen=MAX_NAMED)
        self._known = Lateness()
        self._n_steps = 0
        self._stride = 1

    def node_reported(self, node: int, n_ranks: int, host: str = "", lateness: Lateness | None = None) -> None:
        """Another node's daemon, whose number is its lowest rank, has sent a message.

        An empty `host` and a `lateness` of None were not sent; the latter is that of the node's own ranks.
        """
        self.nodes[node] = n_ranks
        if host:
            self.hosts[node] = host
        if lateness is not None:
            self._of_nodes[node] = lateness

    def node_left(self, node: int) -> None:
        """Another node's daemon has left."""
        self.nodes.pop(node, None)
        self._of_nodes.pop(node, None)

    def observe(self, records: NDArray[np.void], reporters: NDArray[np.uint64], starts: NDArray[np.intp]) -> None:
        """Take the records of whole calls (OBSERVATION, shape (n,)), call by call.

        `reporters`, shape (n,), has the rank or node's daemon that sent each. `starts`, shape (m,), has the beginning
        of each call, ascending from 0.
        """
        starts = starts.astype(np.int64)
        counts = np.diff(np.append(starts, len(records)))
        first = records[starts]
        if len(records) > MANY_RECORDS and self._stride < MOST_SKIPPED:
            self._stride *= 2
        chosen = (counts > 1) & (first["step"] % self._stride == 0)
        chosen &= np.isin(first["collective"].astype(np.int64), _TOGETHER)
        # Fused calls have one kernel, so its wait counts once.
        kernels = first["comm_id"] * _ODD ^ first["start_ns"].astype(np.uint64)
        is_first = np.zeros(len(starts), bool)
        is_first[np.unique(kernels, return_index=True)[1]] = True
        chosen &= is_first
        if not chosen.any():
            return
        starts, counts = starts[chosen], counts[chosen]
        begins = np.cumsum(counts) - counts
        rows = np.repeat(starts - begins, counts) + np.arange(counts.sum())
        self._take(records[rows], reporters[rows].astype(np.int64), begins, counts)

    def _take(self, records: NDArray[np.void], reporters: Ints, begins: Ints, counts: Ints) -> None:
        durations_us = records["duration_us"].astype(np.float64)
        steps = records["step"][begins].astype(np.int64)
        shortest_us = np.minimum.reduceat(durations_us, begins)
        wait_us = medians(durations_us, begins) - shortest_us
        call = np.repeat(np.arange(len(begins)), counts)
        communicators = self._communicators_of(records, reporters, begins, counts)
        of_call = communicators[call]
        is_node = np.isin(reporters, np.array(list(self.nodes), np.int64))
        known = of_call >= 0
        _compare(self._ranks, durations_us, of_call << GROUP_BITS | reporters, steps[call], call, known & ~is_node)
        if self.nodes and not is_node.all():
            own = np.unique(reporters[~is_node])
            self._own_node, self._n_own_ranks = int(own[0]), max(self._n_own_ranks, len(own))
            sender = np.where(is_node, reporters, self._own_node)
            order = np.lexsort((durations_us, sender, call))
            last = order[np.append(True, (np.diff(call[order]) != 0) | (np.diff(sender[order]) != 0))]
            columns = of_call[last] << GROUP_BITS | sender[last]
            of_node = durations_us[last], columns, steps[call[last]], call[last], known[last]
            _compare(self._node_window, *of_node)
            nodes, at = np.unique(sender[last], return_inverse=True)
            later_us = np.array([self._later_us(node) for node in nodes.tolist()])
            if later_us.any():
                # Lateness is summed over all calls of a step.
                n_calls = np.array([self._n_calls.get(one, 1.0) for one in of_call[last].tolist()])
                _compare(self._freed, *of_node, later_us[at] / n_calls)
                self._is_freed = True
            elif self._is_freed:
                self._freed, self._is_freed = ExcessWindow(), False
        sizes = records["message_bytes"][begins].astype(np.float64)
        order = np.lexsort((communicators, steps))
        groups = np.flatnonzero(np.append(True, (np.diff(steps[order]) != 0) | (np.diff(communicators[order]) != 0)))
        summands = (np.ones(len(order)), sizes, shortest_us, wait_us)
        totals = [np.add.reduceat(of[order], groups).tolist() for of in summands]  # messages need Python's numbers
        shapes = records[["n_ranks", "n_nodes"]][begins[order[groups]]].tolist()
        for at, shape, n_calls, n_bytes, us, waited_us in zip(order[groups], shapes, *totals, strict=True):
            step = self._open.setdefault(int(steps[at]), _Step())
            step.add(int(communicators[at]), shape, (n_calls, n_bytes, us), waited_us)
        self._close_steps(int(steps.max()))

    def _communicators_of(self, records: NDArray[np.void], reporters: Ints, begins: Ints, counts: Ints) -> Ints:
        """The number of each call's communicator, -1 if there are too many; also notes a new one's reporters."""
        unique, first, inverse = np.unique(records["comm_id"][begins], return_index=True, return_inverse=True)
        numbers = []
        for comm_id, at in zip(unique.tolist(), first.tolist(), strict=True):
            number = self._index_of.get(comm_id, -1)
            if number < 0 and len(self._members) < MAX_COMMUNICATORS:
                rows = slice(begins[at], begins[at] + counts[at])
                number = self._index_of[comm_id] = len(self._members)
                self._members.append(frozenset(reporters[rows].tolist()))
                self._ranks_of.append(tuple(sorted(records["rank"][rows].tolist())[:MAX_NAMED]))
            numbers.append(number)
        found: Ints = np.array(numbers, np.int64)[inverse]
        return found

    def _close_steps(self, newest: int) -> None:
        """In steps whose calls are complete, compare communicators of one kind that had the same calls."""
        for number in sorted(self._open):
            if newest - OPEN_STEPS < number <= newest + BEGUN_ANEW_STEPS:
                continue
            step = self._open.pop(number)
            self._n_calls |= step.n_calls
            self._closed.append((step.wait_us, step.transfer_us))
            self._n_steps += 1
            for siblings in step.siblings():
                took_us = np.array([us for _, us in siblings])
                excess_us = -behind_the_others(took_us, np.zeros(1, np.int64))
                is_slow = excess_us > SLOWER * (took_us - excess_us)
                excess_us = np.where(is_slow, excess_us, np.minimum(excess_us, 0.0))
                self._communicators.add(number, np.array([one for one, _ in siblings], np.int64), excess_us)

    def lateness(self, step_us: float = 0.0) -> Lateness:
        """The late ranks and slow communicators by now; without a `step_us` above 0, the time of a step is unknown."""
        if not self._closed:
            return self._known
        limit_us = max(LEAST_LATE_US, MATTERS * step_us)
        slower = self._communicators.going_on(limit_us)
        links = [(self._members[one.column], one.usual_us) for one in slower]
        slow = [one for one in slower if one.is_proven]
        blamed_here = blamed(_by_place(self._ranks.going_on(limit_us)), self._members, links)
        before = {one.rank for one in (*self._known.late, *self._own)}
        self._own = tuple(
            self._late(one, one.column)
            for one in blamed_here
            if one.is_proven and (one.goes_on or one.column in before)
        )
        late = {one.rank: one for one in self._own}
        if self.nodes:
            node_of = [frozenset(one if one in self.nodes else self._own_node for one in of) for of in self._members]
            links = [(frozenset(node_of[one.column]), one.usual_us) for one in slower]
            # A daemon does not see its node's link to others: behind a slow link, the node must be proven late itself.
            behind_link = frozenset(node for of_link, _ in links for node in of_link)
            for window, ranks_of in ((self._node_window, self._behind_node), (self._freed, self._late_enough)):
                for node in blamed(_by_place(window.going_on(limit_us)), node_of, links):
                    if node.is_proven or node.column not in behind_link:
                        late = {**_kept(ranks_of(node), node, before), **late}
        gone = [one for one in self._known.late if one.rank not in late]
        self._past.extendleft(gone)
        self._known = Lateness(
            n_steps=self._n_steps,
            wait_us=median(wait for wait, _ in self._closed),
            transfer_us=median(transfer for _, transfer in self._closed),
            late=tuple(sorted(late.values(), key=lambda one: -one.late_us)[:MAX_NAMED]),
            slow=tuple(self._slow(slow))[:MAX_NAMED],
            past=tuple(self._past),
        )
        return self._known

    def _later_us(self, node: int) -> float:
        """By how much a node's named ranks make it later."""
        named = {one.rank for one in self._known.late}
        return max((one.late_us for one in self._there(node) if one.rank in named), default=0.0)

    def _there(self, node: int) -> tuple[LateRank, ...]:
        """Ranks that a node's own daemon finds late among its ranks."""
        return self._own if node == self._own_node else self._of_nodes.get(node, Lateness()).late

    def _behind_node(self, node: Excess) -> dict[int, LateRank]:
        """The cause of a late node: ranks that its own daemon names; else the node itself, if it is proven late."""
        if there := self._late_enough(node):
            self._explained_up_to[node.column] = node.last_step
            return there
        n_ranks = self._n_own_ranks if node.column == self._own_node else self.nodes.get(node.column, 2)
        is_node = n_ranks > 1
        explained_up_to = self._explained_up_to.get(node.column, 0)
        alone_since = max(node.since_step, explained_up_to if explained_up_to <= node.last_step else 0)
        if not node.is_proven or (is_node and node.last_step - alone_since < WHOLE_NODE_STEPS):
            return {}
        return {node.column: self._late(node, node.column, is_node=is_node)}

    def _late_enough(self, node: Excess) -> dict[int, LateRank]:
        """Ranks that a node's own daemon finds late, if they explain the node's lateness; else none."""
        there = self._there(node.column)
        is_enough = any(one.late_us >= node.excess_us / 2 for one in there)
        return {one.rank: one for one in there} if is_enough else {}

    def _late(self, excess: Excess, rank: int, *, is_node: bool = False) -> LateRank:
        host = self.hosts.get(rank, "")
        return LateRank(rank, excess.excess_us, excess.share, excess.since_step, excess.last_step, host, is_node)

    def _slow(self, found: Sequence[Excess]) -> Iterable[SlowCommunicator]:
        for one in found:
            yield SlowCommunicator(self._ranks_of[one.column], one.excess_us, one.share, one.since_step, one.last_step)
        for other in self._of_nodes.values():
            yield from other.slow


class _Step:
    """Sums of one step by communicator."""

    def __init__(self) -> None:
        self.wait_us = 0.0
        self.transfer_us = 0.0
        self._of: dict[int, tuple[tuple[int, int], list[float]]] = {}

    def add(self, communicator: int, shape: tuple[int, int], sums: tuple[float, float, float], wait_us: float) -> None:
        """Add calls of one communicator: its ranks and nodes; sums of calls, bytes and shortest times; waiting time."""
        self.wait_us += wait_us
        self.transfer_us += sums[2]
        if communicator >= 0:
            _, known = self._of.setdefault(communicator, (shape, [0.0, 0.0, 0.0]))
            for place, more in enumerate(sums):
                known[place] += more

    @property
    def n_calls(self) -> dict[int, float]:
        """Number of calls by communicator."""
        return {communicator: sums[0] for communicator, (_, sums) in self._of.items()}

    def siblings(self) -> Iterable[list[tuple[int, float]]]:
        """Groups of communicators of one kind with the same calls: (number, shortest times)."""
        alike: dict[tuple[object, ...], list[tuple[int, float]]] = {}
        for communicator, (shape, (n_calls, n_bytes, us)) in self._of.items():
            alike.setdefault((shape, n_calls, n_bytes), []).append((communicator, us))
        return (group for group in alike.values() if len(group) > 1)


def _compare(
    window: ExcessWindow,
    durations_us: Floats,
    columns: Ints,
    steps: Ints,
    call: Ints,
    which: NDArray[np.bool_],
    later_us: Floats | None = None,
) -> None:
    """Add to `window` how late each of `which` was in its call; `later_us` is lateness that is explained already."""
    later_us = np.zeros(len(call)) if later_us is None else later_us
    columns, steps, call, later_us = columns[which], steps[which], call[which], later_us[which]
    durations_us = durations_us[which] + later_us
    if not len(call):
        return
    begins = np.flatnonzero(np.append(True, np.diff(call) != 0))
    counts = np.diff(np.append(begins, len(call)))
    late_us = behind_the_others(durations_us, begins) + later_us
    several = np.repeat(counts > 1, counts)
    for step in np.unique(steps[several]).tolist():
        here = several & (steps == step)
        window.add(step, columns[here], late_us[here])


def _kept(late: dict[int, LateRank], node: Excess, before: Container[int]) -> dict[int, LateRank]:
    """The ranks that may be named: a node whose lateness may be ending names no new ones."""
    return {rank: one for rank, one in late.items() if node.goes_on or rank in before}


def _by_place(found: Iterable[Excess]) -> dict[tuple[int, int], Excess]:
    """Excesses by communicator and reporter."""
    return {(one.column >> GROUP_BITS, one.column & ((1 << GROUP_BITS) - 1)): one for one in found}
