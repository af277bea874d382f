import numpy as np

from zerotune.agent.daemon_link.cost_table_cache import MAX_QUESTIONS, CostTableCache
from zerotune.store import wire


def tables(*message_bytes, cost_us=1.0):
    block = np.zeros(len(message_bytes), wire.COST_FIELDS)
    block["message_bytes"] = message_bytes
    block["n_ranks"], block["cost_us"] = 8, cost_us
    return block


def told(book):
    return [(int(row["message_bytes"]), float(row["cost_us"][0, 0])) for row in book.unsent()]


def test_it_is_bounded_and_forgets_what_was_asked_longest_ago():
    book = CostTableCache()
    for message_bytes in range(1, MAX_QUESTIONS + 3):
        book.add(tables(message_bytes))
    kept = [message_bytes for message_bytes, _ in told(book)]
    assert kept == list(range(3, MAX_QUESTIONS + 3))
    book.resend_all()
    assert len(book.unsent()) == MAX_QUESTIONS
