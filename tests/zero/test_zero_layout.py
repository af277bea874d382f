from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerotune.zero_runtime.layout.flat_layout import Layout, plan_layout

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12)
layouts = st.builds(
    lambda found, n_ranks, chunk, alignment: plan_layout(
        [(str(i), shape) for i, shape in enumerate(found)], n_ranks, chunk, alignment
    ),
    shapes,
    st.integers(1, 8),
    st.integers(1, 400),
    st.sampled_from([1, 4, 16]),
)


@given(layouts)
def test_every_element_has_one_owner(layout: Layout) -> None:
    owned = [[0] * slot.numel for slot in layout.slots]
    for rank in range(layout.n_ranks):
        for piece in layout.pieces(rank):
            for element in range(piece.slot_offset, piece.slot_offset + piece.numel):
                owned[piece.slot][element] += 1
    assert all(count == 1 for slot in owned for count in slot)


@given(layouts)
def test_chunks_tile_the_buffer_and_slices_tile_the_chunks(layout: Layout) -> None:
    position = shard_position = 0
    for chunk in layout.chunks:
        assert (chunk.start, chunk.shard_start) == (position, shard_position)
        assert chunk.numel == chunk.shard_numel * layout.n_ranks
        slices = [layout.rank_slice(chunk, rank) for rank in range(layout.n_ranks)]
        assert [a for a, _ in slices] == [chunk.start, *(b for _, b in slices[:-1])]
        position, shard_position = chunk.end, shard_position + chunk.shard_numel
    assert position == layout.numel == layout.shard_numel * layout.n_ranks


@given(layouts)
def test_pieces_lie_where_the_shard_says(layout: Layout) -> None:
    for rank in range(layout.n_ranks):
        flat_of_shard: list[int] = []
        for chunk in layout.chunks:
            flat_of_shard += range(*layout.rank_slice(chunk, rank))
        for piece in layout.pieces(rank):
            first = layout.slots[piece.slot].offset + piece.slot_offset
            covered = flat_of_shard[piece.shard_offset : piece.shard_offset + piece.numel]
            assert covered == list(range(first, first + piece.numel))


@given(layouts)
def test_gaps_and_parameters_cover_everything_once(layout: Layout) -> None:
    covered = sum(end - start for start, end in layout.gaps)
    assert covered == layout.padding
    assert covered + layout.n_parameters == layout.numel


@given(shapes, st.integers(1, 8), st.integers(1, 400))
def test_a_chunk_stays_within_its_cap(found: list[tuple[int, ...]], n_ranks: int, cap: int) -> None:
    layout = plan_layout([(str(i), shape) for i, shape in enumerate(found)], n_ranks, cap, alignment=4)
    assert all(chunk.numel <= max(cap, 4 * n_ranks) for chunk in layout.chunks)


@given(layouts)
def test_chunks_of_a_parameter_are_those_that_it_touches(layout: Layout) -> None:
    for slot in layout.slots:
        touched = [
            i
            for i, chunk in enumerate(layout.chunks)
            if set(range(slot.offset, slot.end)) & set(range(chunk.start, chunk.end))
        ]
        assert list(layout.chunks_of(slot)) == touched
