"""Several communicators at once, on streams of their own."""

import torch
import torch.distributed as dist
import toy

options = toy.parser().parse_args()
dist.init_process_group("nccl", device_id=toy.device())
rank, n_ranks, device = dist.get_rank(), dist.get_world_size(), toy.device()
torch.cuda.set_device(device)
groups = [dist.group.WORLD, dist.new_group(), dist.new_group(list(range(n_ranks)))]
weights = torch.nn.Parameter(torch.zeros(1 << 16, device=device))
optimizer = torch.optim.AdamW([weights])
for step in range(options.steps):
    buffers = [torch.full((1 << 16,), float(place + step + rank)).to(device) for place in range(len(groups))]
    works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer, group in zip(buffers, groups, strict=True)]
    for work in reversed(works):
        work.wait()
    for place, buffer in enumerate(buffers):
        expected = n_ranks * (place + step) + sum(range(n_ranks))
        assert buffer.cpu().unique().tolist() == [expected], (step, place, buffer)
    (weights * buffers[0]).sum().backward()
    dist.all_reduce(weights.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
