import threading
import time

import msgspec
import pytest
import zmq

from zerotune.agent.daemon_link.channel import Channel
from zerotune.store import wire


class Outbox:
    def __init__(self):
        self.messages = []

    def tick_s(self):
        return 0.005

    def collect(self):
        taken, self.messages = self.messages, []
        return taken


class Daemon:
    """A ROUTER that answers Hello; run by the test's own thread, message by message."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)

    def receive(self, kind, timeout_ms=5000):
        while True:
            assert self.socket.poll(timeout_ms), f"no {kind.__name__} came"
            sender, *frames = self.socket.recv_multipart()
            message, records = wire.decode_agent(frames)
            if isinstance(message, wire.Hello):
                self.socket.send_multipart([sender, *wire.encode(wire.Welcome(1, "0"))])
            if isinstance(message, kind):
                return sender, message, records

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/d.sock"


@pytest.fixture
def channel(endpoint):
    made = []

    def make(*first):
        alive, messages, outbox = threading.Event(), [], Outbox()
        outbox.messages += first
        hello = wire.Hello("job", 0, 2, 0, "node", 1, "fabric", {}, 0, 5)
        made.append(
            Channel(
                endpoint,
                lambda: hello,
                outbox,
                messages.append,
                lambda up: alive.set() if up else alive.clear(),
            )
        )
        made[-1].start()
        return made[-1], outbox, messages, alive

    yield make
    for one in made:
        one.close()


def test_greets_sends_receives_and_says_goodbye(endpoint, channel):
    daemon = Daemon(endpoint)
    line, outbox, messages, alive = channel()
    sender, hello, _ = daemon.receive(wire.Hello)
    assert hello.job_id == "job"
    assert alive.wait(5)
    outbox.messages.append((wire.Observations("job", 0, 1), bytes(wire.OBSERVATION_BYTES)))
    assert daemon.receive(wire.Observations)[2] == bytes(wire.OBSERVATION_BYTES)
    daemon.socket.send_multipart([sender, b"junk", b"junk"])
    daemon.socket.send_multipart([sender, *wire.encode(wire.Observe("job", 3))])
    daemon.receive(wire.Hello)
    assert messages[-1] == wire.Observe("job", 3) or wire.Observe("job", 3) in messages
    line.close(wire.Goodbye("job", 0))
    assert daemon.receive(wire.Goodbye)[1] == wire.Goodbye("job", 0)
    daemon.close()
    assert alive.is_set(), "who says goodbye has not lost the daemon"


def test_messages_sent_with_the_first_greeting_are_not_lost(endpoint, channel):
    daemon = Daemon(endpoint)
    for _ in range(5):
        line, *_ = channel((wire.Observations("job", 0, 1), bytes(wire.OBSERVATION_BYTES)))
        assert daemon.receive(wire.Observations)[2] == bytes(wire.OBSERVATION_BYTES)
        assert line.n_unsent == 0
        line.close()
    daemon.close()


def test_messages_that_make_no_sense_are_told_of_a_few_times(endpoint, channel, caplog):
    daemon = Daemon(endpoint)
    _, _, messages, _ = channel()
    sender, *_ = daemon.receive(wire.Hello)
    for _ in range(200):
        daemon.socket.send_multipart([sender, b"junk", b"junk"])
    daemon.socket.send_multipart([sender, *wire.encode(wire.Observe("job", 3))])
    ends_at_s = time.monotonic() + 10
    while wire.Observe("job", 3) not in messages:
        assert time.monotonic() < ends_at_s
        time.sleep(0.01)
    told = [record.args[0] for record in caplog.records if record.name == "zerotune.agent" and record.args]
    assert told == [1, 2, 3, 4, 8, 16, 32, 64, 128]
    daemon.close()


def test_refusals_are_told_of_a_few_times_and_steer_no_terminal(endpoint, channel, caplog):
    daemon = Daemon(endpoint)
    _, _, messages, _ = channel()
    sender, *_ = daemon.receive(wire.Hello)
    refusal = wire.ErrorReply("BadHello", "\x1b[2J\u202e" * 500)
    for _ in range(200):
        daemon.socket.send_multipart([sender, *wire.encode(refusal)])
    daemon.socket.send_multipart([sender, wire.HEADER, msgspec.msgpack.encode({"type": "\x1b[2J\u202e" * 100_000})])
    daemon.socket.send_multipart([sender, *wire.encode(wire.Observe("job", 3))])
    ends_at_s = time.monotonic() + 10
    while wire.Observe("job", 3) not in messages:
        assert time.monotonic() < ends_at_s
        time.sleep(0.01)
    told = [record for record in caplog.records if record.name == "zerotune.agent" and record.args]
    assert [record.args[0] for record in told] == [1, 2, 3, 4, 8, 16, 32, 64, 128, 1]
    assert all(record.getMessage().isprintable() for record in told)
    assert len(told[-1].getMessage()) < 2000, "what makes no sense is not quoted at length"
    daemon.close()


def test_without_a_daemon_nothing_waits_and_everything_is_counted(channel):
    line, outbox, _, alive = channel()
    outbox.messages += [(wire.Adopted("job", 1, 1), None)] * 10
    line.close()
    assert "zerotune-channel" not in {thread.name for thread in threading.enumerate()}
    assert line.n_unsent >= 10
    assert not alive.is_set()


def test_a_restarted_daemon_is_greeted_again(endpoint, channel):
    daemon = Daemon(endpoint)
    _, _, _, alive = channel()
    daemon.receive(wire.Hello)
    assert alive.wait(5)
    daemon.close()
    daemon = Daemon(endpoint)
    assert daemon.receive(wire.Hello)[1].job_id == "job"
    daemon.close()


def test_a_job_that_ends_before_it_has_a_name_is_greeted_for_at_its_end(endpoint):
    daemon = Daemon(endpoint)
    outbox, hellos = Outbox(), [None]
    line = Channel(endpoint, lambda: hellos[0], outbox, lambda _: None, lambda _: None)
    line.start()
    time.sleep(0.3)  # it connects, and has no name to greet under
    hellos[0] = wire.Hello("job", 0, 2, 0, "node", 1, "fabric", {}, 0, 5)
    outbox.tick_s = lambda: 60.0
    outbox.messages.append((wire.Observations("job", 0, 1), bytes(wire.OBSERVATION_BYTES)))
    line.close(wire.Goodbye("job", 0))
    kinds = [type(daemon.receive(object)[1]) for _ in range(3)]
    assert kinds == [wire.Hello, wire.Observations, wire.Goodbye]
    daemon.close()
