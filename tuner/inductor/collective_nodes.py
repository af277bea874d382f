"""What a node of a torch graph asks of NCCL."""

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
"""By torch's name. Coalesced ones are several calls that NCCL may fuse, and no single measurement is theirs."""


class NodeCollective(NamedTuple):
    """One collective of a graph."""

    collective: Collective
    ranks: tuple[int, ...]
    """Of the whole job, rising."""
    message_bytes: int
    """Total, as NCCL counts them."""


def collective_of(node: torch.fx.Node) -> NodeCollective | None:
    """The collective that a node starts; None where it starts none that is known, or its size is open."""
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
    if not isinstance(group, str):  # graphs compiled on one rank name the node that finds the group
        group = group.meta["val"].group_name
    ranks = tuple(sorted(get_process_group_ranks(_resolve_process_group(group))))
    if collective is Collective.reduce_scatter:
        n_bytes *= len(ranks)  # its result is a shard
    return NodeCollective(collective, ranks, n_bytes)


def _bytes_of(value: Any) -> int | None:
    """Bytes of a tensor; symbolic sizes count with the hints that torch compiles for."""
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
