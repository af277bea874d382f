"""The collectives made for gloo give what torch's own would, beside a user's messages, and free their memory early."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from zero_world import World, group_of

from zerotune.zero_runtime import collectives
from zerotune.zero_runtime.collectives import EXCHANGED, PLAIN
from zerotune.zero_runtime.stages.gradients import Flights, InFlight, Sum

N_ELEMENTS = [1, 7, 4096]


def gathered(n_ranks: int, in_place: bool) -> list[bool]:
    group = group_of(n_ranks)
    rank = dist.get_rank(group)
    equal = []
    for n in N_ELEMENTS:
        shard = torch.randn(n, generator=torch.Generator().manual_seed(rank)).bfloat16()
        expected, whole = (torch.full((n * n_ranks,), float("nan"), dtype=shard.dtype) for _ in range(2))
        PLAIN.all_gather(expected, shard, group).wait()
        if in_place:
            own = whole[rank * n : (rank + 1) * n]
            own.copy_(shard)
            shard = own
        EXCHANGED.all_gather(whole, shard, group).wait()
        equal.append(torch.equal(whole, expected))
    return equal


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_direct_gather_equals_torchs(world: World, n_ranks: int, in_place: bool) -> None:
    for equal in world.run(n_ranks, gathered, n_ranks, in_place):
        assert equal == [True] * len(N_ELEMENTS)


def gathered_beside_messages() -> tuple[list[float], list[float]]:
    """Two gathers under way at once, with a user's message in the same group posted before and between them."""
    group = group_of(2)
    rank = dist.get_rank(group)
    said, heard = torch.full((3,), 100.0 + rank), torch.zeros(3)
    receive = dist.irecv(heard, group=group, group_src=1 - rank)
    wholes = [torch.zeros(6) for _ in range(2)]
    first = EXCHANGED.all_gather(wholes[0], torch.full((3,), 1.0 + rank), group)
    send = dist.isend(said, group=group, group_dst=1 - rank)
    second = EXCHANGED.all_gather(wholes[1], torch.full((3,), 11.0 + rank), group)
    for work in (second, first, receive, send):
        assert work is not None
        work.wait()
    return heard.tolist(), torch.cat(wholes).tolist()


def test_direct_gather_does_not_take_a_users_message_for_a_shard(world: World) -> None:
    for rank, (heard, wholes) in enumerate(world.run(2, gathered_beside_messages)):
        assert heard == [101.0 - rank] * 3
        assert wholes == [1.0] * 3 + [2.0] * 3 + [11.0] * 3 + [12.0] * 3


def done_before_waited_for() -> list[bool]:
    group = group_of(2)
    shard, whole = torch.zeros(2), torch.arange(4.0)
    work = EXCHANGED.reduce_scatter(shard, whole, group)
    deadline = time.monotonic() + 20
    while not EXCHANGED.is_done(work) and time.monotonic() < deadline:
        time.sleep(0.001)
    done = EXCHANGED.is_done(work)
    work.wait()
    rank = dist.get_rank(group)
    plain = PLAIN.all_reduce(torch.zeros(1), group)
    plain.wait()
    return [done, torch.equal(shard, 2 * whole[2 * rank : 2 * rank + 2]), PLAIN.is_done(plain)]


def test_a_sum_that_arrived_is_known_to_be_done(world: World) -> None:
    for answer in world.run(2, done_before_waited_for):
        assert answer == [True, True, False]  # where a stream keeps order, nobody asks


def test_gloo_has_the_direct_ones(world: World) -> None:
    assert world.run(2, backend_of_two) == [True, True]


def backend_of_two() -> bool:
    return collectives.for_group(group_of(2)) is EXCHANGED


class Arriving:
    """Work of a flight, and who it belongs to: writes down when it is landed."""

    def __init__(self, name: str, landed: list[str]) -> None:
        self.name, self.landed, self.arrived = name, landed, False

    def wait(self) -> None:
        pass

    def is_done(self, _: object) -> bool:
        return self.arrived

    def land(self, _: object) -> None:
        self.landed.append(self.name)


def test_only_what_arrived_lands_early_and_in_order() -> None:
    landed: list[str] = []
    works = [Arriving(name, landed) for name in "abc"]
    flights = Flights(limit=3)
    for work in works:
        flights.push(InFlight(work, work, (Sum(0, torch.zeros(1), torch.zeros(1), first=True),)))
    works[1].arrived = works[2].arrived = True
    flights.land_done()
    assert landed == []  # the first is under way
    works[0].arrived, works[2].arrived = True, False
    flights.land_done()
    assert landed == ["a", "b"]
    flights.land_all()
    assert landed == ["a", "b", "c"]
