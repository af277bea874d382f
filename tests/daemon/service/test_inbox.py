"""What waits and what does not."""

from __future__ import annotations

from zerotune.tuner.service.inbox import MAX_WAITING_BYTES, MAX_WAITING_MESSAGES, Inbox

STEPS = [b"header", b"steps"]
RECORDS = [b"header", b"observations", b"records"]


def test_only_records_and_later_words_of_their_sender_wait():
    inbox = Inbox()
    assert not inbox.put(b"a", STEPS)
    assert inbox.put(b"a", RECORDS)
    assert inbox.put(b"a", STEPS), "after its records"
    assert not inbox.put(b"b", STEPS), "others' need not wait"
    assert [inbox.take(), inbox.take()] == [(b"a", RECORDS), (b"a", STEPS)]
    assert not inbox
    assert not inbox.put(b"a", STEPS)


def test_room_is_bounded_in_messages_and_bytes():
    many, large = Inbox(), Inbox()
    for _ in range(MAX_WAITING_MESSAGES):
        assert many.has_room
        many.put(b"a", RECORDS)
    assert not many.has_room
    large.put(b"a", [b"header", b"body", bytes(MAX_WAITING_BYTES)])
    assert not large.has_room
    large.take()
    assert large.has_room
