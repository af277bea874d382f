"""Reasons for leaving out entries of a trace."""

from __future__ import annotations

from enum import Enum
from typing import Final


class LeftOut(Enum):
    """A reason: its name is the key in `import --json`, its value is the text for people."""

    no_duration = "no duration"
    enqueue_time = "the time it took to enqueue, not to run"
    cpu_time = "times of the CPU (-C), not of the collective"
    impossible_time = "row with an impossible time"
    row_without_time = "rows without a time"
    contradicting_time = "rows whose time is not their size by their bandwidth (is it in another unit?)"
    decision = "records of decisions, whose collectives have timed records of their own"
    bytes_unknown = "bytes unknown"
    bytes_or_ranks_unknown = "bytes or ranks unknown"
    no_bytes = "no bytes, or impossibly many"
    size_zero = "rows of size 0"
    kernel_without_size = "kernel of which the trace does not say the size"
    before_window = "kernel launched before the trace began, which does not say its size"
    impossible_size = "impossible sizes"
    ranks_unknown = "number of ranks unknown, or 1"
    nodes_unknown = "number of nodes unknown"
    too_many_nodes = "more nodes than ranks"
    impossible_ranks_or_nodes = "row with an impossible number of ranks or nodes"
    partial_ranks = "not reported by all ranks"
    too_many_ranks = "reported by more ranks than its group has"
    late_or_twice = "reported twice, or too late"
    setting_unknown = "nobody says which setting ran"
    cannot_run = "settings that NCCL cannot run for their collective"
    impossible_channels = "row with an impossible number of channels"
    nothing_to_choose = "collectives for which NCCL has nothing to choose"
    selection_without_collective = "selection without its collective (before 2.23)"
    selection_without_ranks = "selection of a communicator of unknown ranks"
    selection_of_several_releases = (
        "selections in a log of NCCL before and since 2.24, which count their bytes otherwise"
    )
    selection_with_unknown_name = "selection with an unknown name"
    collective_unknown = "rows of a table that does not say which collective (name it with --collective)"
    other_collective = "rows of another collective than the one that the file names before them"
    point_to_point = "point to point"
    point_to_point_or_unknown = "point to point or unknown operation"
    not_a_collective = "not a collective (waits, barriers, compute)"
    barrier_or_unknown = "barrier or unknown operation"
    unknown_operation = "unknown operation"
    unknown_program = "results of an unknown program"
    unknown_kind = "of an unknown kind"
    unknown_name = "row with an unknown name or number"
    no_entry = "not an entry"
    no_result = "not a result"
    few_columns = "row with too few columns"
    other_columns = "row with another number of columns"
    wrong_result = "rows with wrong results"
    failed_run = "run that failed or stands out"
    impossible_value = "values that no record allows"
    damaged_line = "damaged line"
    damaged_row = "damaged rows"
    damaged_file = "damaged file"
    lost = "lost before they reached the file"


NOT_COLLECTIVES: Final = frozenset(
    {
        LeftOut.decision, LeftOut.not_a_collective, LeftOut.point_to_point, LeftOut.point_to_point_or_unknown,
        LeftOut.barrier_or_unknown, LeftOut.unknown_operation, LeftOut.unknown_program, LeftOut.no_entry,
        LeftOut.no_result, LeftOut.size_zero,
    }
)  # fmt: skip
"""Reasons that leave out nothing that could have been judged."""
UNSIZED: Final = frozenset(
    {
        LeftOut.bytes_unknown, LeftOut.bytes_or_ranks_unknown, LeftOut.kernel_without_size, LeftOut.impossible_size,
        LeftOut.selection_without_collective, LeftOut.selection_without_ranks, LeftOut.damaged_line,
        LeftOut.damaged_file, LeftOut.no_entry, LeftOut.impossible_value, LeftOut.lost,
    }
)  # fmt: skip
"""Reasons that leave out a collective that ran and is nowhere else in the trace."""
