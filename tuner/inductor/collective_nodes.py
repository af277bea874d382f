"""The collective that a node of a torch graph starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...store.records import Collective

if TYPE_CHECKING:
    import torch.fx

NAMESPACE: Final = "_c10d_functional::"
COLLECTIVES: Final = {
    "all_gather_into_tensor": Collective.all_gather,
    "all_gather_into_tensor_out": Collective.all_gather,
    "reduce_scatter_tensor": Collective.reduce_scatter,
    "all_reduce": Collective.all_reduce,
    "all_reduce_": Collective.all_reduce,
    "broadcast": Collective.broadcast,
    "broadcast_": Collective.broadcast,
}
"""By torch's name. Coalesced ones are left out: NCCL may fuse their calls, so no single measurement applies."""


class NodeCollective(NamedTuple):
    """One collective of a graph."""

    collective: Collective
    ranks: tuple[int, ...]
    """Ranks of the whole job, ascending."""
    message_bytes: int
    """NCCL's total size."""


def collective_of(node: torch.fx.Node) -> NodeCollective | None:
    """The collective that a node starts; None if it starts no known one, or its size is unknown."""
    from torch.distributed.distributed_c10d import _resolve_process_group, get_process_group_ranks
    from torch.fx.operator_schemas import normalize_function

    schema = getattr(node.target, "_schema", None)
    name = getattr(schema, "name", "")
    collective = COLLECTIVES.get(name.removeprefix(NAMESPACE)) if name.startswith(NAMESPACE) else None
    if collective is None or not callable(node.target):
        return None
    n_bytes = _bytes_of(node.meta.get("val"))
    normalized = normalize_function(node.target, node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    if n_bytes is None or normalized is None:
        return None
    group = normalized.kwargs["group_name"]
    if not isinstance(group, str):  # graphs compiled on one rank have a node that finds the group
        group = group.meta["val"].group_name
    ranks = tuple(sorted(get_process_group_ranks(_resolve_process_group(group))))
    if collective is Collective.reduce_scatter:
        n_bytes *= len(ranks)  # the result is a shard
    return NodeCollective(collective, ranks, n_bytes)


def _bytes_of(value: Any) -> int | None:
    """Bytes of a tensor; symbolic sizes count with torch's hints."""
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    n_bytes = value.element_size()
    extents: tuple[Any, ...] = tuple(value.shape)
    for extent in extents:
        if not isinstance(extent, int):
            if not extent.node.has_hint():
                return None
            extent = extent.node.hint
        n_bytes *= int(extent)
    return n_bytes or None
