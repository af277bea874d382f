"""Python objects and small tensors that torch and frameworks send must arrive, and what is not 0 must be counted."""

import torch
import torch.distributed as dist
import toy

options = toy.parser().parse_args()
dist.init_process_group("nccl")
rank, n_ranks, device = dist.get_rank(), dist.get_world_size(), toy.device()
torch.cuda.set_device(device)

for round_ in range(options.steps):
    told = [{"from": 0, "round": round_, "text": "x" * round_}] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=0)
    assert told == [{"from": 0, "round": round_, "text": "x" * round_}], told

    gathered = [None] * n_ranks
    dist.all_gather_object(gathered, ("rank", rank, "y" * (1 + 50 * rank)))
    assert gathered == [("rank", each, "y" * (1 + 50 * each)) for each in range(n_ranks)], gathered

    mine = torch.arange(4 * n_ranks, dtype=torch.float32) + rank
    total = mine.to(device)
    dist.all_reduce(total)
    expected = n_ranks * torch.arange(4.0 * n_ranks) + sum(range(n_ranks))
    assert torch.equal(total.cpu(), expected), total

    share = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(share, mine.to(device))
    assert torch.equal(share.cpu(), expected[4 * rank : 4 * rank + 4]), share

    for kind in (torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        highest = torch.tensor([rank, 5 - rank], dtype=kind).to(device)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        assert highest.cpu().tolist() == [n_ranks - 1, 5], (kind, highest)

    swapped = torch.empty(2, dtype=torch.int64, device=device)
    dist.all_to_all_single(swapped, torch.tensor([10 * rank, 10 * rank + 1]).to(device))
    assert swapped.cpu().tolist() == [rank, 10 + rank], swapped

    mask = [(round_ + each) % 3 == 0 for each in range(30)]
    assert len(torch.tensor(mask).to(device).nonzero()) == sum(mask)
    assert "device" in str(total)  # to print it, torch takes the numbers that are not 0

    if rank == 0:
        dist.send(torch.tensor([7.0 + round_]).to(device), 1)
    elif rank == 1:
        got = torch.empty(1, device=device)
        dist.recv(got, 0)
        assert got.item() == 7.0 + round_
    dist.barrier()
dist.destroy_process_group()
