import ctypes
import threading

import numpy as np
import pytest

from zerotune.agent.observing.ring import UNKNOWN_RANK, RecordDrain
from zerotune.agent.steps.step_queue import MAX_QUEUED, StepQueue
from zerotune.store import wire
from zerotune.store.records import StepRecord
from zerotune.store.records.passages import Passage, PassageKind, Passages


class FakeRings:
    def __init__(self, block, costs=()):
        self.blocks = [block]
        self.seen = Passages()
        self.costs = [np.zeros(len(costs), wire.COST_FIELDS)]
        self.costs[0]["message_bytes"] = costs

    def drain(self, max_records):
        assert max_records * wire.OBSERVATION_BYTES <= wire.MAX_RECORDS_BYTES
        return self.blocks.pop() if self.blocks else np.zeros(0, wire.OBSERVATION_FIELDS)

    def drain_costs(self, max_records):
        return self.costs.pop() if self.costs else np.zeros(0, wire.COST_FIELDS)

    def n_dropped(self):
        return 7

    def passages(self):
        return self.seen


def block(flags):
    records = np.zeros(len(flags), wire.OBSERVATION_FIELDS)
    records["flags"] = flags
    records["rank"] = UNKNOWN_RANK
    return records


def decode(message, records):
    return wire.decode_agent([bytes(frame) for frame in wire.encode(message, records)])


def test_rank_0_sends_everything_others_timed_records_only():
    for rank, expected in ((0, 4), (3, 2)):
        drain = RecordDrain(FakeRings(block([0, 2, 3, 1])), "job", rank, StepQueue())
        ((head, records),) = drain.collect()
        message, body = decode(head, records)
        assert message == wire.Observations("job", rank, expected, 7)
        assert set(np.frombuffer(body, wire.OBSERVATION_FIELDS)["rank"]) == {rank}


def test_cost_tables_go_before_the_calls_that_they_are_about_and_once():
    drain = RecordDrain(FakeRings(block([0]), costs=[1]), "job", 0, StepQueue())
    assert [type(message) for message, _ in drain.collect()] == [wire.CostTables, wire.Observations]
    assert drain.collect() == []
    drain.costs.resend_all()
    ((head, _),) = drain.collect()
    assert head == wire.CostTables("job", 0, 1)


def test_adoptions_go_before_steps_and_cost_tables_from_rank_0_only():
    queue = StepQueue()
    drain = RecordDrain(FakeRings(block([]), costs=[1, 2]), "job", 0, queue)
    queue.add(StepRecord(1, 5, 10.0))
    queue.adopt(5, 1)
    costs, *messages = [decode(*message)[0] for message in drain.collect()]
    assert costs == wire.CostTables("job", 0, 2)
    assert messages == [wire.Adopted("job", 5, 1), wire.Steps("job", 0, (StepRecord(1, 5, 10.0),))]
    assert drain.collect() == []
    assert RecordDrain(FakeRings(block([]), costs=[1]), "job", 1, StepQueue()).collect() == []


def test_of_two_threads_that_collect_at_once_one_gets_all():
    class SlowRings(FakeRings):
        def drain(self, max_records):
            if not inside.is_set():
                inside.set()
                assert goes_on.wait(60)
            return super().drain(max_records)

    inside, goes_on, got = threading.Event(), threading.Event(), []
    drain = RecordDrain(SlowRings(block([0, 2])), "job", 0, StepQueue())
    thread = threading.Thread(target=lambda: got.append(drain.collect()))
    thread.start()
    assert inside.wait(60)
    assert drain.collect() == []
    goes_on.set()
    thread.join()
    (((head, _),),) = got
    assert head.n_records == 2


class Log:
    def __init__(self):
        self.n_records, self.n_dropped, self.logged_steps = 0, 0, []

    def record(self, block, *, n_dropped=0):
        self.n_records += len(block)
        self.n_dropped = n_dropped

    def steps(self, steps):
        self.logged_steps += steps


def test_steps_that_found_no_room_are_counted_with_the_records_that_did_not():
    log, queue = Log(), StepQueue()
    for step in range(MAX_QUEUED + 3):
        queue.add(StepRecord(step, 0, 10.0))
    RecordDrain(FakeRings(block([0])), "job", 1, queue, log).collect()
    assert [record.step for record in log.logged_steps] == list(range(3, MAX_QUEUED + 3))
    assert log.n_dropped == 7 + 3


def test_calls_without_tuner_are_sent_when_they_changed():
    rings = FakeRings(block([]))
    drain = RecordDrain(rings, "job", 3, StepQueue())
    assert drain.collect() == []
    rings.seen = Passages((Passage(PassageKind.symmetric, 2, 4096, 2, 50.0),), 1)
    ((head, records),) = drain.collect()
    message, body = decode(head, records)
    assert (message.passages, message.n_records, body) == (rings.seen, 0, b"")
    assert drain.collect() == []


class MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_of_all_sizes_leave_nothing_in_memory(rank):
    in_use = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if in_use is None:
        pytest.skip("mallinfo2, by which memory in use is read, is glibc's from 2.33 on")
    in_use.restype = MallInfo
    rings = FakeRings(block([]))
    drain = RecordDrain(rings, "job", rank, StepQueue())

    def collect(n):
        rings.blocks.append(np.zeros(n, wire.OBSERVATION_FIELDS))
        drain.collect()

    for _ in range(100):
        collect(1)
    before = in_use().uordblks
    for n in range(1, 1100):
        collect(n)
    assert in_use().uordblks - before < 100_000
