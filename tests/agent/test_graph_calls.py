"""How many calls ran in replayed graphs."""

from zerotune.agent.steps.graphs import GraphCalls


class Graph:
    """Something that is captured."""


def test_replays_count_as_often_as_they_run_and_captures_not_at_all():
    n_calls = 10
    calls = GraphCalls(lambda: n_calls)
    assert calls.share == 0.0
    small, large = Graph(), Graph()
    for graph, held in ((small, 2), (large, 8)):
        calls.capture(graph, True)
        n_calls += held
        calls.capture(graph, False)
    for _ in range(5):
        calls.replay(small)
    for _ in range(10):
        calls.replay(large)
    n_calls += 10
    assert (calls.n_captured, calls.n_replayed) == (10, 90)
    assert calls.share == 90 / (20 + 90)


def test_a_graph_that_nobody_saw_captured_replays_nothing():
    calls = GraphCalls(lambda: 0)
    calls.replay(Graph())
    assert calls.share == 0.0
